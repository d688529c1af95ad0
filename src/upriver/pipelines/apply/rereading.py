"""Reads complete vbuckets from the nodes, with the options of the target's query."""

from collections.abc import Iterable, Mapping
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from upriver.errors import DataLoss
from upriver.pipelines.apply.applying import NOTHING
from upriver.pipelines.apply.task_apply import ATTEMPTS_MAX, read_ahead
from upriver.pipelines.targets.target import NodeSource, ReadAhead, ReadBasis
from upriver.spark import (
    FIELDS,
    ClusterView,
    Range,
    RangeReader,
    Reading,
    ReadOptions,
    RowMaker,
    Rules,
    SourceState,
    VbucketOffset,
)

#: Changes to hold in memory at a time; at least those of one vbucket.
CHANGES_MAX: Final = 256 * 1024


class NodeReader(NodeSource):
    """Reads from the nodes; connects on first use."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._view = ClusterView(options.cluster, options.vbuckets)
        self._reader: RangeReader | None = None

    def vbuckets(self) -> list[int]:
        """All vbuckets, or the selected ones."""
        return self._view.vbuckets()

    def grounds(self, vbuckets: Iterable[int]) -> Mapping[int, ReadBasis]:
        """The current basis of these vbuckets."""
        states = self._view.states()
        found = {number: states[number] for number in vbuckets if number in states}
        return {number: ReadBasis(state.vbucket_uuid, state.purge_seqno) for number, state in found.items()}

    def groups(self, vbuckets: Iterable[int]) -> list[list[int]]:
        """The vbuckets in groups that fit into memory."""
        states = self._view.states()
        groups: list[list[int]] = []
        held = 0
        for number in sorted(vbuckets):
            size = states[number].high_seqno if number in states else 0
            if not groups or held + size > CHANGES_MAX:
                groups.append([])
                held = 0
            groups[-1].append(number)
            held += size
        return groups

    def read(self, vbuckets: Iterable[int]) -> tuple[pa.Table, dict[int, ReadAhead]]:
        """The documents of these vbuckets, and the seqno of the read."""
        left, tables, ahead = set(vbuckets), [NOTHING], dict[int, ReadAhead]()
        for _ in range(ATTEMPTS_MAX):
            before = self._states(left)
            rows = self._rows(before)
            after = self._states(left)
            same = {number for number in left if after[number].vbucket_uuid == before[number].vbucket_uuid}
            tables.append(_of(rows, same))
            ahead |= {number: read_ahead(before[number], after[number]) for number in same}
            left -= same
            if not left:
                return pa.concat_tables(tables), ahead
        raise DataLoss(min(left), f"it changed its branch {ATTEMPTS_MAX} times during the read; try again later")

    def close(self) -> None:
        """Close the connections."""
        self._view.close()
        if self._reader is not None:
            self._reader.close()

    def _states(self, vbuckets: Iterable[int]) -> dict[int, SourceState]:
        states = self._view.states()
        missing = [number for number in vbuckets if number not in states]
        if missing:
            raise DataLoss(min(missing), "no node has it now")
        return {number: states[number] for number in vbuckets}

    def _rows(self, states: Mapping[int, SourceState]) -> pa.Table:
        ranges = [
            Range(VbucketOffset(number, state.vbucket_uuid), state.high_seqno)
            for number, state in states.items()
            if state.high_seqno
        ]
        if self._reader is None or not self._reader.is_open:
            self._reader = self._new_reader()
        return pa.Table.from_batches(self._reader.read(ranges), NOTHING.schema)

    def _new_reader(self) -> RangeReader:
        rows = RowMaker(tuple(FIELDS), keys_only=self._options.keys_only)
        settings = self._options.consumer_settings(rows.to_decode)
        return RangeReader(Reading(self._options.cluster, settings, Rules("emit"), rows, self._options.rows_per_batch))


def _of(rows: pa.Table, vbuckets: set[int]) -> pa.Table:
    wanted = pc.is_in(rows.column("vbucket"), pa.array(sorted(vbuckets), pa.int32()))
    return rows.filter(pc.and_(wanted, pc.is_valid(rows.column("key"))))
