"""What a pipeline keeps up to date, whatever it is: it takes work, a transaction each, and knows how far it is."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa


class ReadBasis(NamedTuple):
    """What a read of a vbucket stands on: while neither changes, the stream tells all that happens after the read.

    It would not say that the node has left the branch. Nor would it tell a deletion that the node has forgotten since:
    a stream from the beginning supposes that nothing is held yet.
    """

    vbucket_uuid: int
    purge_seqno: int


class ReadAhead(NamedTuple):
    """A vbucket was read from the node itself, and its content is further than the stream is.

    Until the stream has passed ``until_seqno`` the ground is looked at before every batch.
    """

    vbucket_uuid: int
    #: The content is exactly the node's state here, so that the stream's changes up to it are known already; else 0.
    consistent_seqno: int
    #: The stream knows everything that was read once it has come here.
    until_seqno: int
    purge_seqno: int = 0

    @property
    def ground(self) -> ReadBasis:
        """What the read stands on."""
        return ReadBasis(self.vbucket_uuid, self.purge_seqno)


class TargetProgress(NamedTuple):
    """How far a target is."""

    #: The query whose batches it holds; None if nothing was ever written.
    query: str | None = None
    #: The last batch that it holds.
    number: int = -1
    ahead: Mapping[int, ReadAhead] = {}

    def after(self, work: "Work") -> "TargetProgress":
        """How far it is when the work is done."""
        number = work.number
        if number is None:
            number = self.number if self.query == work.query else -1
        return TargetProgress(work.query, number, dict(work.ahead))

    def as_text(self) -> str:
        """In a form that every target can hold."""
        ahead = {str(number): list(read) for number, read in self.ahead.items()}
        return json.dumps({"version": 1, "query": self.query, "number": self.number, "ahead": ahead})

    @classmethod
    def of_text(cls, text: str) -> "TargetProgress":
        """What ``as_text`` gave."""
        told: Mapping[str, Any] = json.loads(text)
        ahead = {int(number): ReadAhead(*read) for number, read in told["ahead"].items()}
        return cls(told["query"], told["number"], ahead)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a target does in one transaction."""

    query: str
    #: The batch that is complete with it; None if more work belongs to the batch.
    number: int | None
    #: The rows of Spark that count, each key of a vbucket once: mutations are stored, the others remove.
    rows: pa.Table
    #: Vbuckets whose content is dropped before the rows are stored.
    cleared: frozenset[int] = frozenset()
    #: Everything is dropped before.
    clear_all: bool = False
    #: What is true of read vbuckets when it is done.
    ahead: Mapping[int, ReadAhead] = field(default_factory=dict)


class Target(ABC):
    """Something that holds the latest state of every key."""

    @abstractmethod
    def progress(self) -> TargetProgress:
        """How far it is, as the last transaction has left it."""

    @abstractmethod
    def commit(self, work: Work) -> None:
        """Do the work completely or not at all; where that is impossible, so that doing it again completes it."""

    @abstractmethod
    def close(self) -> None:
        """Let go of files and connections."""


class NodeSource(ABC):
    """The node, asked directly: what the stream alone cannot tell."""

    @abstractmethod
    def grounds(self, vbuckets: Iterable[int]) -> Mapping[int, ReadBasis]:
        """What a read of each of these vbuckets would stand on now."""

    @abstractmethod
    def groups(self, vbuckets: Iterable[int]) -> list[list[int]]:
        """The same vbuckets in groups that are small enough to be held."""

    @abstractmethod
    def read(self, vbuckets: Iterable[int]) -> tuple[pa.Table, dict[int, ReadAhead]]:
        """All that these vbuckets hold, as rows of Spark, and how far that is."""
