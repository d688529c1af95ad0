"""What a producer needs of the store behind it. The node fits the engine to this; a test may bring its own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from upriver.model import FailoverLog, Snapshot, VbucketState


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """What a stream shall hold; a connection's controls say so."""

    keys_only: bool = False
    key_filter: str = ""
    value_filter: str = ""
    persisted_only: bool = False
    exact_end: bool = False
    history: bool = False
    disk_only: bool = False

    @property
    def filtered(self) -> bool:
        """Changes may be left out, so the position must be told apart from them."""
        return bool(self.key_filter or self.value_filter)


class History(Protocol):
    """A place in the history of a vbucket from which snapshots are read."""

    @property
    def seqno(self) -> int:
        """Everything up to here was read."""

    @property
    def snapshot(self) -> Snapshot | None:
        """The announced snapshot that is not read to its end yet."""

    @property
    def from_disk(self) -> bool:
        """Does the announced snapshot come from disk?"""

    @property
    def end_reason(self) -> str | None:
        """Why nothing more comes: "ok", "state changed", "flushed", "rolled back", "too slow", "closed"; None before."""

    def next_snapshot(self) -> Snapshot | None:
        """Announce the next snapshot; None if there is nothing new, or the end is reached."""

    def read(self, max_bytes: int, opaque: int) -> bytes:
        """The next packets of the announced snapshot as `dcp` frames."""

    def read_columns(self, max_bytes: int) -> pa.RecordBatch:
        """The next changes of the announced snapshot."""

    def subscribe(self, callback: Callable[[], object]) -> None:
        """Call back once when there may be more to read."""

    def close(self) -> None:
        """Let go of it."""


class SourceVbucket(Protocol):
    """A vbucket as a producer sees it."""

    @property
    def number(self) -> int: ...
    @property
    def state(self) -> VbucketState: ...
    @property
    def failover_log(self) -> FailoverLog: ...
    @property
    def high_seqno(self) -> int: ...
    @property
    def purge_seqno(self) -> int: ...
    @property
    def streamable(self) -> bool: ...

    def set_state(self, state: VbucketState) -> None:
        """Take on a role."""


class Source(Protocol):
    """The store that streams are made of."""

    def vbucket(self, number: int) -> SourceVbucket | None:
        """The vbucket in whatever state; None if there is none."""

    def history(self, vbucket: int, name: str, start: int, end: int, options: StreamOptions) -> History:
        """Open a place in the history; raises a StatusError if that cannot be."""

    def when_durable(self, callback: Callable[[], object]) -> None:
        """Call back when everything done so far is on disk."""
