"""A disk that keeps what was committed and nothing else, and that can refuse any commit, or lose its power in it."""

import json
from collections.abc import Iterator
from typing import Any, ClassVar

from upriver.engine.storage.interface import Block, Storage, WriteBatch
from upriver.engine.storage.lmdb import cut
from upriver.errors import StorageError


class PowerLost(BaseException):
    """The machine stopped in the middle of a commit; whether it counts, only the next start tells."""


class Disk(Storage):
    """What survives a crash. One object outlives many buckets."""

    keeps_records: ClassVar[bool] = True

    def __init__(self, name: str) -> None:
        self.path = name
        #: The next commit fails: 1 without a trace, 2 with the power before it, 3 with the power right after it.
        self.trouble = 0
        self.commits = 0
        self._facts: dict[str, Any] = {}
        self._descriptions: dict[int, str] = {}
        self._groups: dict[int, bytes] = {}
        self._blocks: dict[tuple[int, int], bytes] = {}

    def facts(self) -> dict[str, Any]:
        return dict(self._facts)

    def descriptions(self) -> dict[int, dict[str, Any]]:
        return {vbucket: json.loads(text) for vbucket, text in sorted(self._descriptions.items())}

    def blocks(self, vbucket: int, after: int = 0, max_bytes: int = 2**63) -> list[Block]:
        found: list[Block] = []
        size = 0
        for (owner, upto), records in sorted(self._blocks.items()):
            if owner == vbucket and upto > after and (not found or size + len(records) <= max_bytes):
                found.append(Block(vbucket, upto, records))
                size += len(records)
        return found

    def all_blocks(self) -> Iterator[tuple[int, memoryview]]:
        for (vbucket, _), records in sorted(self._blocks.items()):
            yield vbucket, memoryview(records)

    def groups(self) -> Iterator[tuple[int, memoryview]]:
        for number, group in sorted(self._groups.items()):
            yield number, memoryview(group)

    def commit(self, batch: WriteBatch) -> None:
        trouble, self.trouble = self.trouble, 0
        if trouble == 1:
            raise StorageError(self.path, "the disk is full")
        if trouble == 2:
            raise PowerLost
        self._write(batch)
        self.commits += 1
        if trouble == 3:
            raise PowerLost

    def _write(self, batch: WriteBatch) -> None:
        for vbucket, seqno in batch.trims.items():
            self._trim(vbucket, seqno)
        for place in batch.removed:
            self._blocks.pop(place, None)
        for block in batch.blocks:
            self._blocks[block.vbucket, block.upto] = bytes(block.records)
        if batch.group is not None:
            number, group = batch.group
            assert not self._groups or number > max(self._groups), "groups are appended"
            self._groups[number] = bytes(group)
        self._groups = {number: group for number, group in self._groups.items() if number > batch.drop_groups_to}
        for vbucket, description in batch.descriptions.items():
            if description is None:
                self._descriptions.pop(vbucket, None)
            else:
                self._descriptions[vbucket] = json.dumps(description)
        self._facts.update(json.loads(json.dumps(batch.facts)))

    def _trim(self, vbucket: int, seqno: int) -> None:
        beyond = sorted(place for place in self._blocks if place[0] == vbucket and place[1] > seqno)
        straddling = cut(self._blocks[beyond[0]], seqno) if beyond and seqno else b""
        for place in beyond:
            del self._blocks[place]
        if straddling:
            self._blocks[vbucket, seqno] = straddling

    def backup(self, path: str) -> None:
        raise StorageError(path, "a simulated disk is not backed up")

    def size_bytes(self) -> int:
        return sum(map(len, self._groups.values())) + sum(map(len, self._blocks.values()))

    def blocks_bytes(self) -> int:
        return sum(map(len, self._blocks.values()))

    def close(self) -> None:
        """What was committed stays."""
