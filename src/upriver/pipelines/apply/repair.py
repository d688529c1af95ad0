"""Repairs vbuckets in another cluster after their source has rolled back.

The copies have their own seqnos, so they cannot be rolled back. Instead they are compared with the source, and the
differences are written without conflict resolution, because a lost change may have the higher revision. Tombstones are
compared too: a tombstone that the source does not have would win against a key that is created again, so it is replaced
by one that loses every conflict.

In both-way replication nothing is forced: the newer version wins on both sides, so that each side restores what the
other has lost.

Documents that were read may be lost by another failover before the stream has passed them. Or a key is deleted and its
tombstone purged, which a stream from the beginning does not report. So each repair leaves a *mark*: the basis of the
read and the source's high seqno. The repair is repeated if the basis changes before the stream is consistent at that
seqno. While the vbucket has no owner, the mark stays.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import pyarrow as pa

from upriver.client import Address, Cluster, Consumer, KvClient
from upriver.client.cluster import active_vbuckets
from upriver.errors import KeyExists, KeyNotFound, NotMyVbucket, RowsRefused, StatusError
from upriver.model import CHANGES, Event
from upriver.pipelines.targets.target import ReadBasis
from upriver.wire.dialects.memcached import MetaOption

#: Changes to compare at a time; at least those of one vbucket.
CHANGES_MAX: Final = 256 * 1024
#: How often a comparison is repeated because the source failed over meanwhile.
_ATTEMPTS_MAX: Final = 10
#: The metadata of a tombstone that loses every conflict.
_WEAKEST: Final = (1, 1)
_SAMPLES_MAX: Final = 5


class Mark(NamedTuple):
    """The basis of a repair, and the source's high seqno at that time."""

    vbucket_uuid: int
    high_seqno: int
    purge_seqno: int = 0

    @property
    def ground(self) -> ReadBasis:
        """The basis of the read."""
        return ReadBasis(self.vbucket_uuid, self.purge_seqno)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which keys are copied, and their names at the target."""

    #: Whether a key of the source is copied.
    chosen: Callable[[bytes], bool]
    #: The name of a key at the target, and the reverse; None if the source has no such key.
    there: Callable[[bytes], bytes]
    back: Callable[[bytes], bytes | None]
    #: Whether keys are renamed, and so may change their vbucket.
    renames: bool = False


class Repair:
    """Compares vbuckets of two clusters and writes the differences."""

    def __init__(
        self, source: Address, target: Address, selection: Selection, filters: dict[str, Any], *, merge: bool = False
    ) -> None:
        self._addresses = source, target
        self._selection = selection
        self._filters = filters
        self._merge = merge
        #: Number of repaired keys.
        self.keys = 0

    async def run(self, vbuckets: Iterable[int]) -> dict[int, Mark]:
        """Repair these vbuckets; returns their marks."""
        marks: dict[int, Mark] = {}
        source, target = Cluster(self._addresses[0]), Cluster(self._addresses[1])
        try:
            same_places = (await source.open()).vbuckets == (await target.open()).vbuckets
            narrow = same_places and not self._selection.renames
            for group in await self._groups(source, sorted(vbuckets)):
                marks |= await self._run_group(source, target, group, narrow)
        finally:
            await source.close()
            await target.close()
        return marks

    async def grounds(self, vbuckets: Iterable[int]) -> dict[int, ReadBasis]:
        """The current basis of these vbuckets, without those that have no owner now."""
        cluster = Cluster(self._addresses[0])
        try:
            states = await active_vbuckets(cluster, sorted(vbuckets))
        finally:
            await cluster.close()
        return {number: ReadBasis(state.vbucket_uuid, state.purge_seqno) for number, state in states.items()}

    async def _groups(self, source: Cluster, numbers: list[int]) -> list[list[int]]:
        states = await active_vbuckets(source, numbers)
        groups: list[list[int]] = []
        room = 0
        for number in numbers:
            if number not in states:
                raise NotMyVbucket("no node has it now", vbucket=number)
            size = states[number].high_seqno
            if not groups or size > room:
                groups.append([])
                room = CHANGES_MAX
            groups[-1].append(number)
            room -= size
        return groups

    async def _run_group(self, source: Cluster, target: Cluster, group: list[int], narrow: bool) -> dict[int, Mark]:
        for _ in range(_ATTEMPTS_MAX):
            before = await active_vbuckets(source, group)
            ours = await self._read(self._addresses[0], group, self._filters)
            after = await active_vbuckets(source, group)
            if before.keys() == after.keys() == set(group) and all(
                before[number].vbucket_uuid == after[number].vbucket_uuid for number in group
            ):
                break
        else:
            raise NotMyVbucket("its source keeps changing its branch; try again later", vbucket=group[0])
        held = await self._read(self._addresses[1], group if narrow else None, {})
        if not narrow:  # a document outside of the vbucket of its key has no counterpart
            ours = {place: version for place, version in ours.items() if source.map.vbucket_of(place[1]) == place[0]}
            held = {place: version for place, version in held.items() if target.map.vbucket_of(place[1]) == place[0]}
        wanted = frozenset(group)
        theirs: _Versions = {}
        for (vbucket, there), version in held.items():
            key = self._selection.back(there)
            if key is None or not self._selection.chosen(key):
                continue
            here = vbucket if narrow else source.map.vbucket_of(key)
            if here in wanted:
                theirs[here, key] = version
        await self._write(ours, theirs, narrow)
        return {
            number: Mark(state.vbucket_uuid, state.high_seqno, before[number].purge_seqno)
            for number, state in after.items()
        }

    async def _read(self, address: Address, vbuckets: Sequence[int] | None, filters: dict[str, Any]) -> "_Versions":
        """The newest version of each key in each vbucket, tombstones included."""
        found: _Versions = {}
        async with Consumer(address, vbuckets=vbuckets, end="latest", on_rollback="rewind", **filters) as consumer:
            async for batch in consumer:
                if batch.event is None:
                    found.update(((version.vbucket, version.key), version) for version in _versions(batch.records))
        return found

    async def _write(self, ours: "_Versions", theirs: "_Versions", narrow: bool) -> None:
        now = int(time.time())
        there, here = self._selection.there, []
        rows: list[_Version] = []
        for place, version in ours.items():
            vbucket, key = place
            other = theirs.get(place)
            if (other is None or other.meta != version.meta) and not version.is_over(now):
                rows.append(version._replace(key=there(key)))
                if other is not None:
                    here.append(other._replace(vbucket=vbucket, key=key))
        for place, version in theirs.items():
            if place not in ours and not version.is_over(now) and version.meta != (False, *_WEAKEST):
                vbucket, key = place
                rows.append(_tombstone(vbucket, there(key)))
                here.append(version._replace(vbucket=vbucket, key=key))
        rows = [row for row in rows if row.meta[1:] != _WEAKEST] if self._merge else rows
        self.keys += len(rows) + (len(here) if self._merge else 0)
        options = None if self._merge else MetaOption.SKIP_CONFLICT_RESOLUTION
        await _write_all(self._addresses[1], rows, options, narrow)
        if self._merge:
            await _write_all(self._addresses[0], here, None, narrow)


class _Version(NamedTuple):
    """A version of a key in a vbucket."""

    vbucket: int
    key: bytes
    event: int
    rev_seqno: int
    cas: int
    value: bytes
    flags: int
    expiry: int
    datatype: int

    @property
    def meta(self) -> tuple[bool, int, int]:
        """What identifies a version: an expiration becomes a deletion at the target."""
        return self.event == Event.MUTATION, self.rev_seqno, self.cas

    def is_over(self, now: int) -> bool:
        """Whether it is an expired document, which each side removes by itself."""
        return self.event == Event.MUTATION and 0 < self.expiry <= now


_Versions = dict[tuple[int, bytes], _Version]


def _tombstone(vbucket: int, key: bytes) -> _Version:
    return _Version(vbucket, key, Event.DELETION, *_WEAKEST, b"", 0, 0, 0)


def _versions(records: pa.RecordBatch) -> Iterator[_Version]:
    columns = [records.column(name).to_pylist() for name in _Version._fields]
    return map(_Version._make, zip(*columns, strict=True))


async def _write_all(
    address: Address, rows: Sequence[_Version], options: MetaOption | None, keep_vbuckets: bool
) -> None:
    if not rows:
        return
    columns = {
        name: pa.array([getattr(row, name) for row in rows], CHANGES.field(name).type) for name in _Version._fields
    }
    async with KvClient(address) as kv:
        refused = await kv.write_batch(
            pa.record_batch(columns), with_meta=True, options=options, keep_vbuckets=keep_vbuckets
        )
    failed: dict[bytes, StatusError] = {
        key: error for key, error in refused.items() if not isinstance(error, KeyNotFound | KeyExists)
    }
    if failed:
        raise RowsRefused(len(failed), [f"{key!r}: {error}" for key, error in list(failed.items())[:_SAMPLES_MAX]])
