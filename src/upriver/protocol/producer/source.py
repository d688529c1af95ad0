"""What a producer needs of the store behind it. The node fits the engine to this; a test may bring its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from upriver.model import FailoverLog, Snapshot, VbucketState


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """What a stream shall hold; its request and the connection's settings say so."""

    keys_only: bool = False
    key_filter: str = ""
    value_filter: str = ""
    persisted_only: bool = False
    #: End with the version that was current at the end seqno, and nothing beyond it.
    exact_end: bool = False
    #: Every retained version instead of the newest ones.
    history: bool = False


class History(Protocol):
    """A place in the history of a vbucket from which snapshots are read."""

    @property
    def seqno(self) -> int:
        """Everything up to here was read."""

    @property
    def changes_read(self) -> int:
        """How many changes were read so far."""

    @property
    def expirations_read(self) -> int:
        """How many of those that were read as frames are expirations."""

    @property
    def last_read_seqno(self) -> int:
        """The seqno of the last change that was read as a frame; where it began if none was."""

    @property
    def bytes_filtered(self) -> int:
        """How many bytes a filter has looked at so far, whether they passed or not."""

    @property
    def snapshot(self) -> Snapshot | None:
        """The announced snapshot that is not read to its end yet."""

    @property
    def from_disk(self) -> bool:
        """Does the announced snapshot come from disk?"""

    @property
    def begins_checkpoint(self) -> bool:
        """Does the announced snapshot begin where a checkpoint does?"""

    @property
    def end_reason(self) -> str | None:
        """Why nothing more comes: "ok", "closed", "state changed", "flushed", "rolled back", "too slow"; or None."""

    @property
    def checkpoint(self) -> int:
        """The id of the checkpoint that the next change belongs to."""

    @property
    def in_open_checkpoint(self) -> bool:
        """Is that checkpoint still open?"""

    def next_snapshot(self) -> Snapshot | None:
        """Announce the next snapshot; None if there is nothing new, or nothing more comes."""

    def read(self, max_bytes: int, opaque: int) -> bytes:
        """The next changes of the announced snapshot as `dcp` frames; at least one if there is one."""

    def read_into(self, buffer: memoryview, opaque: int) -> int:
        """The same into a buffer, how many bytes; nothing if it is too small for the next one. Not with filters."""

    def read_records(self, max_bytes: int) -> bytes:
        """The next changes of the announced snapshot as records: when each happened and how many hops it may make."""

    def read_columns(self, max_bytes: int) -> pa.RecordBatch:
        """The next changes of the announced snapshot."""

    def subscribe(self, callback: Callable[[], object], *, fresh: bool = False) -> None:
        """Call back once when there may be more to read, or when it has ended: at once if that is so already.

        With ``fresh`` only what happens from now on counts.
        """

    def close(self) -> None:
        """Let go of it."""


class SourceVbucket(Protocol):
    """A vbucket as a producer sees it."""

    @property
    def number(self) -> int:
        """Which one it is."""

    @property
    def state(self) -> VbucketState:
        """The role of this copy."""

    @property
    def successor(self) -> str:
        """The name of the takeover that this copy died for; empty if it lives, or died for none."""

    def may_hand_over_to(self, successor: str) -> bool:
        """Whether this takeover may have it: it died for no other, and nobody has it yet."""

    @property
    def failover_log(self) -> FailoverLog:
        """The branches that its history has lived on."""

    @property
    def high_seqno(self) -> int:
        """The newest change."""

    @property
    def consistent_seqno(self) -> int:
        """The newest state that this copy held whole."""

    @property
    def persisted_seqno(self) -> int:
        """The newest change that is on disk."""

    @property
    def purge_seqno(self) -> int:
        """Deletions up to here may be forgotten."""

    @property
    def flush_ttl(self) -> int:
        """How many hops the news of its last flush may make."""

    @property
    def flush_marks(self) -> Sequence[int]:
        """What its last flushes are known by, newest last."""

    @property
    def streamable(self) -> bool:
        """It was active once, or has received a snapshot: it has something to stream."""


class Source(Protocol):
    """The store that streams are made of."""

    def vbucket(self, number: int) -> SourceVbucket | None:
        """The vbucket in whatever state; None if there is none."""

    def vbuckets(self) -> list[int]:
        """The numbers of all that there are, in whatever state."""

    def check(self, options: StreamOptions) -> None:
        """Refuse filters that make no sense, with a StatusError."""

    def history(self, vbucket: int, name: str, start: int, end: int, options: StreamOptions) -> History:
        """Open a place in the history; raises a StatusError if that cannot be."""

    def set_state(self, vbucket: int, state: VbucketState, *, successor: str = "") -> None:
        """Give a vbucket another role; who dies in a takeover remembers for whom."""

    def confirm_takeover(self, vbucket: int, successor: str) -> None:
        """Who this copy died for is active: nobody may take it over from here any more."""

    def when_durable(self, callback: Callable[[], object]) -> None:
        """Call back when everything done so far is on disk."""
