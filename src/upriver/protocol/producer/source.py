"""What a producer needs of the store behind it. The node implements this with the engine, tests with a list in
memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from upriver.model import FailoverLog, Snapshot, VbucketState


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """What a stream contains, according to its request and the settings of the connection."""

    keys_only: bool = False
    key_filter: str = ""
    value_filter: str = ""
    persisted_only: bool = False
    #: End with the versions that were current at the end seqno, and nothing beyond it.
    exact_end: bool = False
    #: Every retained version instead of the newest ones.
    history: bool = False


class SourceCursor(Protocol):
    """A position in the history of a vbucket from which snapshots are read."""

    @property
    def seqno(self) -> int:
        """Everything up to here was read."""

    @property
    def changes_read(self) -> int:
        """How many changes were read so far."""

    @property
    def expirations_read(self) -> int:
        """How many of the changes that were read as frames are expirations."""

    @property
    def last_read_seqno(self) -> int:
        """The seqno of the last change that was read as a frame; the start if there was none."""

    @property
    def bytes_filtered(self) -> int:
        """How many bytes the filters have read so far, whether they passed or not."""

    @property
    def undecided(self) -> bool:
        """Whether a filter is still looking at the next change, so that nothing can be read before."""

    def when_decided(self, callback: Callable[[], object]) -> None:
        """Call back once when it has decided: at once if it has already."""

    @property
    def snapshot(self) -> Snapshot | None:
        """The announced snapshot, until it is read to its end."""

    @property
    def from_disk(self) -> bool:
        """Whether the announced snapshot comes from disk."""

    @property
    def begins_checkpoint(self) -> bool:
        """Whether the announced snapshot begins where a checkpoint does."""

    @property
    def end_reason(self) -> str | None:
        """Why nothing more comes: "ok", "closed", "state changed", "flushed", "rolled back" or "too slow"; None
        before."""

    @property
    def checkpoint(self) -> int:
        """The id of the checkpoint that the next change belongs to."""

    @property
    def in_open_checkpoint(self) -> bool:
        """Whether that checkpoint is still open."""

    def next_snapshot(self) -> Snapshot | None:
        """Announce the next snapshot; None if there is nothing new, or nothing more comes."""

    def read(self, max_bytes: int, opaque: int) -> bytes:
        """The next changes of the announced snapshot as `dcp` frames; at least one if there is one."""

    def read_into(self, buffer: memoryview, opaque: int) -> int:
        """The same into a buffer; returns how many bytes, 0 if it is too small for the next frame. Not with filters."""

    def read_records(self, max_bytes: int) -> bytes:
        """The next changes of the announced snapshot as records, which hold the time and the remaining hops of each."""

    def read_columns(self, max_bytes: int) -> pa.RecordBatch:
        """The next changes of the announced snapshot."""

    def subscribe(self, callback: Callable[[], object], *, fresh: bool = False) -> None:
        """Call back once when there may be more to read, or when the history has ended: at once if that is so already.

        With ``fresh`` only later changes count.
        """

    def close(self) -> None:
        """Release the position."""


class SourceVbucket(Protocol):
    """A vbucket as a producer sees it."""

    @property
    def number(self) -> int:
        """Its number."""

    @property
    def state(self) -> VbucketState:
        """The role of this copy."""

    @property
    def successor(self) -> str:
        """The only connection that may complete the takeover of this dead copy; empty if there was none."""

    def may_hand_over_to(self, successor: str) -> bool:
        """Whether this connection may take the copy over: it has no other successor, and no takeover was completed."""

    @property
    def failover_log(self) -> FailoverLog:
        """Its branches, newest first."""

    @property
    def high_seqno(self) -> int:
        """The seqno of the newest change."""

    @property
    def consistent_seqno(self) -> int:
        """The newest consistent point of this copy."""

    @property
    def persisted_seqno(self) -> int:
        """The seqno of the newest change that is on disk."""

    @property
    def purge_seqno(self) -> int:
        """Tombstones up to here may be purged."""

    def checkpoint_start(self, checkpoint: int) -> int | None:
        """The seqno after which the checkpoint with this id begins; None if it is not known."""

    @property
    def flush_ttl(self) -> int:
        """How many more hops its last flush may be passed on."""

    @property
    def flush_marks(self) -> Sequence[int]:
        """The marks of its last flushes, newest last."""

    @property
    def streamable(self) -> bool:
        """Whether it has something to stream: it was active once, or has received a snapshot."""


class Source(Protocol):
    """The store whose changes are streamed."""

    def vbucket(self, number: int) -> SourceVbucket | None:
        """The vbucket in any role; None if there is none."""

    def vbuckets(self) -> list[int]:
        """The numbers of all vbuckets, in any role."""

    def check(self, options: StreamOptions) -> None:
        """Refuse invalid filters with a StatusError."""

    def cursor(self, vbucket: int, name: str, start: int, end: int, options: StreamOptions) -> SourceCursor:
        """Open a cursor; raises a StatusError if that is impossible."""

    def set_state(self, vbucket: int, state: VbucketState, *, successor: str = "") -> None:
        """Change the role of a vbucket; with ``dead``, store the successor."""

    def confirm_takeover(self, vbucket: int, successor: str) -> None:
        """The successor of this copy is active: no other connection may take it over from here."""

    def when_durable(self, callback: Callable[[], object]) -> None:
        """Call back when everything done so far is on disk."""
