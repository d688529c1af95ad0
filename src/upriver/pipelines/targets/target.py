"""The interface of a target: it applies work in transactions, and stores its progress."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa


class ReadBasis(NamedTuple):
    """The basis of a read of a vbucket: while neither field changes, the stream reports all changes after the read.

    The stream would not report that the node has left the branch. Nor would it report a deletion whose tombstone was
    purged: a stream from the beginning assumes an empty consumer.
    """

    vbucket_uuid: int
    purge_seqno: int


class ReadAhead(NamedTuple):
    """A vbucket that was read from the node, so that the target is ahead of the stream.

    Until the stream has passed ``until_seqno``, the basis is checked before every batch.
    """

    vbucket_uuid: int
    #: The seqno at which the content is exactly the node's state, so that the stream's changes up to it are known; else
    #: 0.
    consistent_seqno: int
    #: The seqno at which the stream has caught up with the read.
    until_seqno: int
    purge_seqno: int = 0

    @property
    def ground(self) -> ReadBasis:
        """The basis of the read."""
        return ReadBasis(self.vbucket_uuid, self.purge_seqno)


class TargetProgress(NamedTuple):
    """The progress of a target."""

    #: The query whose batches it holds; None before the first write.
    query: str | None = None
    #: The last batch in the target.
    number: int = -1
    ahead: Mapping[int, ReadAhead] = {}

    def after(self, work: "Work") -> "TargetProgress":
        """The progress after the work."""
        number = work.number
        if number is None:
            number = self.number if self.query == work.query else -1
        return TargetProgress(work.query, number, dict(work.ahead))

    def as_text(self) -> str:
        """The progress as text."""
        ahead = {str(number): list(read) for number, read in self.ahead.items()}
        return json.dumps({"version": 1, "query": self.query, "number": self.number, "ahead": ahead})

    @classmethod
    def of_text(cls, text: str) -> "TargetProgress":
        """The progress from ``as_text``."""
        told: Mapping[str, Any] = json.loads(text)
        ahead = {int(number): ReadAhead(*read) for number, read in told["ahead"].items()}
        return cls(told["query"], told["number"], ahead)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of one transaction."""

    query: str
    #: The batch that this work completes; None if more work follows, -1 if none is complete any more.
    number: int | None
    #: The Spark rows, each key of a vbucket once: mutations are stored, deletions remove.
    rows: pa.Table
    #: Vbuckets to clear before the rows are stored.
    cleared: frozenset[int] = frozenset()
    #: Whether to clear the whole target first.
    clear_all: bool = False
    #: The reads that are ahead of the stream after the work.
    ahead: Mapping[int, ReadAhead] = field(default_factory=dict)


class Target(ABC):
    """A store of the latest state of every key."""

    @abstractmethod
    def progress(self) -> TargetProgress:
        """The progress after the last transaction."""

    @abstractmethod
    def commit(self, work: Work) -> None:
        """Do the work atomically; where that is impossible, so that a repetition completes it."""

    @abstractmethod
    def close(self) -> None:
        """Close files and connections."""


class NodeSource(ABC):
    """Direct access to the nodes."""

    @abstractmethod
    def grounds(self, vbuckets: Iterable[int]) -> Mapping[int, ReadBasis]:
        """The current basis of these vbuckets."""

    @abstractmethod
    def groups(self, vbuckets: Iterable[int]) -> list[list[int]]:
        """The vbuckets in groups that fit into memory."""

    @abstractmethod
    def read(self, vbuckets: Iterable[int]) -> tuple[pa.Table, dict[int, ReadAhead]]:
        """The documents of these vbuckets as Spark rows, and the seqno of the read."""
