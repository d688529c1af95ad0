"""What a consumer may be told, checked before anything is connected."""

import math
import os
import secrets
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypedDict

from upriver.client.consumer.progress import Progress
from upriver.client.consumer.tracked_vbuckets import POLICIES, Policy
from upriver.client.transport.backoff import PATIENCE_S
from upriver.errors import InvalidArguments, NotSupported
from upriver.model import CHANGES, StreamPosition

Start = Literal["earliest", "latest"] | Mapping[int, StreamPosition | Progress]
End = Literal["never", "latest"] | Mapping[int, int]

DRAFTS: Final = ("upr_draft1", "upr_draft2", "upr_draft3")
DIALECTS: Final = ("dcp", "upr", *DRAFTS, "tap")
WINDOW_BYTES: Final = 16 * 1024 * 1024
NOOP_INTERVAL_S: Final = 30.0
STALL_S: Final = 60.0


def default_name() -> str:
    """A name that no other consumer has."""
    return f"upriver:{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


class ConsumerArguments(TypedDict, total=False):
    """The fields of ``ConsumerSettings`` as keyword arguments, for type checkers."""

    dialect: str
    vbuckets: Iterable[int] | None
    start: Start
    end: End
    on_rollback: Policy
    keys_only: bool
    key_filter: str | None
    value_filter: str | None
    persisted_only: bool
    history: bool
    exact_end: bool | None
    active_only: bool
    columns: tuple[str, ...]
    stream_port: int | None
    name: str
    window_bytes: int
    noop_interval_s: float
    stall_s: float
    patience_s: float | None
    auto_acknowledge: bool
    checkpoint_interval_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSettings:
    """The options of a ``Consumer``."""

    #: Which of the protocols to speak.
    dialect: str = "dcp"
    #: Which vbuckets to follow; None for all.
    vbuckets: Iterable[int] | None = None
    #: From the beginning, from now on, or from a position for each vbucket.
    start: Start = "earliest"
    #: Go on for ever, stop at what is there now, or after a seqno for each vbucket.
    end: End = "never"
    #: What to do when the source has lost changes that were handed out already.
    on_rollback: Policy = "fail"
    #: Leave out the values.
    keys_only: bool = False
    #: A regular expression (RE2) that is searched in each key.
    key_filter: str | None = None
    #: A condition on a field of a JSON value, as the node's setting `value_filter` takes it.
    value_filter: str | None = None
    #: Only what is on the source's disk.
    persisted_only: bool = False
    #: Every retained version of a key.
    history: bool = False
    #: Ranges shall end with the state that was current there; None: if ``end`` is given and the source can.
    exact_end: bool | None = None
    #: Only from active copies. Else from whatever copy the map names, which may be behind and need never move on.
    active_only: bool = True
    #: Which columns of the changes to decode; all unless told otherwise.
    columns: tuple[str, ...] = tuple(CHANGES.names)
    #: Where each node gives streams, if not where it answers everything else; a pinned listener, for instance.
    stream_port: int | None = None
    #: What the connections are called in the source's statistics. In `tap` it is also what the source remembers the
    #: consumer by; one that is given is registered, and comes back under it in another process too.
    name: str = ""
    #: Whether the name was given, and not made up here.
    is_named: bool = field(init=False, default=False)
    #: How much may be on its way or waiting here, per node.
    window_bytes: int = WINDOW_BYTES
    #: How often the source shall say that it is there; after two intervals of silence it is given up.
    noop_interval_s: float = NOOP_INTERVAL_S
    #: After how long a vbucket that does not move is complained about.
    stall_s: float = STALL_S
    #: After how long a vbucket that gets no stream is given up; None: after a minute if ``end`` is given, else never.
    patience_s: float | None = None
    #: Whether asking for the next batch says that the one before is done; else ``acknowledge`` says so.
    auto_acknowledge: bool = True
    #: How often progress is saved, at most.
    checkpoint_interval_s: float = 1.0

    def __post_init__(self) -> None:
        if self.dialect not in DIALECTS:
            raise InvalidArguments(f"there is no dialect {self.dialect!r}; known are {', '.join(DIALECTS)}")
        if self.on_rollback not in POLICIES:
            raise InvalidArguments(f"there is no policy {self.on_rollback!r}; known are {', '.join(POLICIES)}")
        if isinstance(self.start, str) and self.start not in ("earliest", "latest"):
            raise InvalidArguments(f"start is earliest, latest or positions, not {self.start!r}")
        if isinstance(self.end, str) and self.end not in ("never", "latest"):
            raise InvalidArguments(f"end is never, latest or seqnos, not {self.end!r}")
        if self.dialect in DRAFTS and self.needs_settings:
            raise InvalidArguments(f"{self.dialect} knows no settings: no filters, no keys_only, no history")
        if self.dialect == "tap":
            self._check_tap()
        unknown = [name for name in self.columns if name not in CHANGES.names]
        if unknown or not self.columns:
            raise InvalidArguments(f"there is no column {', '.join(unknown)}; known are {', '.join(CHANGES.names)}")
        if self.window_bytes < 0 or self.noop_interval_s < 0 or self.stall_s <= 0:
            raise InvalidArguments("window, noop interval and stall time are not negative")
        if self.patience_s is not None and not self.patience_s > 0:
            raise InvalidArguments("patience takes some time")
        if self.vbuckets is not None:
            wanted = sorted(set(self.vbuckets))
            if not wanted or wanted[0] < 0 or wanted[-1] > 0xFFFF:
                raise InvalidArguments("name at least one vbucket, by numbers from 0")
            object.__setattr__(self, "vbuckets", tuple(wanted))
        object.__setattr__(self, "is_named", bool(self.name))
        object.__setattr__(self, "name", self.name or default_name())

    def _check_tap(self) -> None:
        """TAP tells neither seqnos nor branches, so much cannot be promised; better refused than left out."""
        impossible = {
            "positions to start from": isinstance(self.start, Mapping)
            and any(type(each) is StreamPosition for each in self.start.values()),
            "ranges that end at a seqno": isinstance(self.end, Mapping),
            "exact ends": bool(self.exact_end),
            "ranges that start at the end": (self.start, self.end) == ("latest", "latest"),
            "history": self.history,
            "filters": bool(self.key_filter or self.value_filter or self.persisted_only),
        }
        wanted = [name for name, asked in impossible.items() if asked]
        if wanted:
            raise InvalidArguments(f"tap tells no seqnos and has no {', no '.join(wanted)}; dcp has")

    @property
    def decoded(self) -> tuple[str, ...]:
        """The columns that are decoded: beside those that are handed out, what is needed to cut and to inflate."""
        needed = [] if self.end == "never" else ["seqno"]
        if "value" in self.columns:
            needed.append("datatype")
        if self.dialect in DRAFTS:
            needed = ["vbucket", "seqno", *needed]
        needed = list(dict.fromkeys(needed))
        return (*self.columns, *(name for name in needed if name not in self.columns))

    @property
    def gives_up_after_s(self) -> float:
        """How long a vbucket may be without a stream. Whoever waits for an end shall not wait for ever."""
        if self.patience_s is not None:
            return self.patience_s
        return math.inf if self.end == "never" else PATIENCE_S

    @property
    def needs_settings(self) -> bool:
        """Whether something is wanted that a connection must be told."""
        return bool(self.key_filter or self.value_filter or self.persisted_only or self.history or self.keys_only)

    def own_controls(self, *, ours: bool, node: str) -> dict[str, str]:
        """The settings that only nodes of ours understand; refuses to leave out one that changes what comes."""
        wanted: dict[str, str] = {}
        if self.key_filter is not None:
            wanted["key_filter"] = self.key_filter
        if self.value_filter is not None:
            wanted["value_filter"] = self.value_filter
        if self.persisted_only:
            wanted["persisted_only"] = "true"
        if self.history:
            wanted["history"] = "true"
        if wanted and not ours:
            raise NotSupported(f"{node} is no node of Upriver and has no {', '.join(wanted)}")
        if not ours:
            return {}
        if self.keys_only:
            wanted["keys_only"] = "true"
        if self.exact_end or (self.exact_end is None and self.end != "never"):
            wanted["exact_end"] = "true"
        return wanted
