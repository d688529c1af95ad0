"""The interface of a storage: one atomic batch at a time, and a few ways to read.

Stored are *groups* (everything that changed in some 50 ms, across all vbuckets: one cheap append), *blocks*
(the records of one vbucket in large pieces, made of many groups by a checkpoint), one *description* per
vbucket (role, failover log, bounds) and a few facts about the bucket. A batch changes any of them together
or not at all.
"""

import abc
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

#: Blocks hold about this many bytes of records.
BLOCK_BYTES: Final = 256 * 1024


@dataclass(slots=True)
class Block:
    """Stored records of one vbucket: the retained ones after the previous block, up to ``upto``."""

    vbucket: int
    upto: int
    records: bytes


@dataclass(slots=True)
class WriteBatch:
    """The changes of one transaction, applied in the order of the fields."""

    #: Per vbucket the seqno at which its blocks end from now on.
    trims: dict[int, int] = field(default_factory=dict)
    #: Blocks to be removed: vbucket and ``upto``.
    removed: list[tuple[int, int]] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    #: Number and content of the new group. The storage may release the content, and must copy it to keep it: its memory
    #: is reused after the commit.
    group: tuple[int, bytes | memoryview] | None = None
    #: Groups up to this number are dropped.
    drop_groups_to: int = 0
    #: None removes a vbucket.
    descriptions: dict[int, dict[str, Any] | None] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(
            self.trims
            or self.removed
            or self.blocks
            or self.group
            or self.drop_groups_to
            or self.descriptions
            or self.facts
        )

    def rewritten(self) -> set[int]:
        """The vbuckets whose existing blocks it changes."""
        return {*self.trims, *(vbucket for vbucket, _ in self.removed)}


class Storage(abc.ABC):
    """One data directory, or memory. Failures are raised as ``StorageError``."""

    #: Whether records can be read back: only then may values be evicted.
    keeps_records: ClassVar[bool]
    #: For messages.
    path: str

    @abc.abstractmethod
    def facts(self) -> dict[str, Any]:
        """Facts about the bucket; empty for a new one."""

    @abc.abstractmethod
    def descriptions(self) -> dict[int, dict[str, Any]]:
        """The descriptions of all vbuckets."""

    @abc.abstractmethod
    def blocks(self, vbucket: int, after: int = 0, max_bytes: int = 2**63) -> list[Block]:
        """Blocks of a vbucket that reach beyond ``after``, in order, at least one if there is one."""

    @abc.abstractmethod
    def all_blocks(self) -> Iterator[tuple[int, memoryview]]:
        """The records of every block, by vbucket and in order; each is valid until the next is asked for."""

    @abc.abstractmethod
    def groups(self) -> Iterator[tuple[int, memoryview]]:
        """All groups in order; each is valid until the next is asked for."""

    @abc.abstractmethod
    def commit(self, batch: WriteBatch) -> None:
        """All of the batch is on disk when this returns; none of it if it raises."""

    @abc.abstractmethod
    def backup(self, path: str) -> None:
        """Write a consistent copy into an empty or new directory, while others read and write."""

    @abc.abstractmethod
    def size_bytes(self) -> int:
        """The disk space in use."""

    @abc.abstractmethod
    def blocks_bytes(self) -> int:
        """The disk space that blocks take."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release everything."""
