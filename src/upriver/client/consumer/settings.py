"""The settings of a consumer, checked before it connects."""

import math
import os
import secrets
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypedDict, get_args

from upriver.client.consumer.progress import Progress
from upriver.client.consumer.tracked_vbuckets import POLICIES, Policy
from upriver.client.transport.backoff import PATIENCE_S
from upriver.errors import InvalidArguments, NotSupported
from upriver.model import CHANGES, StreamPosition

Start = Literal["earliest", "latest"] | Mapping[int, StreamPosition | Progress]
End = Literal["never", "latest"] | Mapping[int, int]

DialectName = Literal["dcp", "upr", "upr_draft1", "upr_draft2", "upr_draft3", "tap"]
DIALECTS: Final[tuple[DialectName, ...]] = get_args(DialectName)
DRAFTS: Final = ("upr_draft1", "upr_draft2", "upr_draft3")
#: The columns of a change; a test compares them with the schema.
ColumnName = Literal[
    "vbucket", "event", "seqno", "rev_seqno", "cas", "flags", "expiry", "lock_time", "datatype", "key", "value"
]
WINDOW_BYTES: Final = 16 * 1024 * 1024
NOOP_INTERVAL_S: Final = 30.0
STALL_S: Final = 60.0


def default_name() -> str:
    """A name that no other consumer has."""
    return f"upriver:{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


class ConsumerArguments(TypedDict, total=False):
    """The fields of ``ConsumerSettings`` as keyword arguments, for type checkers."""

    dialect: DialectName
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
    columns: tuple[ColumnName, ...]
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

    #: The dialect to speak.
    dialect: DialectName = "dcp"
    #: The vbuckets to follow; None for all.
    vbuckets: Iterable[int] | None = None
    #: Start at the beginning, at the current end, or at a position for each vbucket.
    start: Start = "earliest"
    #: Never end, end at the current high seqnos, or at a seqno for each vbucket.
    end: End = "never"
    #: What to do when the source has lost changes that were delivered already.
    on_rollback: Policy = "fail"
    #: Do not fetch values: they are None.
    keys_only: bool = False
    #: A regular expression (RE2) that is searched in each key.
    key_filter: str | None = None
    #: A condition on a field of a JSON value, in the syntax of the node's setting `value_filter`.
    value_filter: str | None = None
    #: Only changes that are on the source's disk.
    persisted_only: bool = False
    #: Every retained version of a key.
    history: bool = False
    #: Ranges end with the state that was current at their end; None: if ``end`` is given and the source can do it.
    exact_end: bool | None = None
    #: Read only active copies. Otherwise read the newest replica of a vbucket that has no active copy; it may be behind
    #: and never advance.
    active_only: bool = True
    #: The columns of the changes to decode.
    columns: tuple[ColumnName, ...] = tuple(CHANGES.names)
    #: The port for stream requests, if it differs from the node's port: a listener of one draft, for instance.
    stream_port: int | None = None
    #: The name of the connections in the source's statistics. In `tap` the source remembers the consumer by it. A given
    #: name is registered, so that the consumer can resume under it in another process.
    name: str = ""
    #: Whether the name was given, not generated.
    is_named: bool = field(init=False, default=False)
    #: The maximum number of unprocessed bytes per node.
    window_bytes: int = WINDOW_BYTES
    #: The interval of the source's noops; after two silent intervals the connection is closed.
    noop_interval_s: float = NOOP_INTERVAL_S
    #: A vbucket that has not advanced for this long, though its source is ahead, is reported.
    stall_s: float = STALL_S
    #: Give up when a vbucket has had no stream for this long; None: a minute if ``end`` is given, else unlimited.
    patience_s: float | None = None
    #: Whether asking for the next batch acknowledges the one before; otherwise call ``acknowledge``.
    auto_acknowledge: bool = True
    #: The minimum time between two saves of the progress.
    checkpoint_interval_s: float = 1.0

    def __post_init__(self) -> None:
        if self.dialect not in DIALECTS:
            raise InvalidArguments(f"unknown dialect {self.dialect!r}; choose from {', '.join(DIALECTS)}")
        if self.on_rollback not in POLICIES:
            raise InvalidArguments(f"unknown policy {self.on_rollback!r}; choose from {', '.join(POLICIES)}")
        if isinstance(self.start, str) and self.start not in ("earliest", "latest"):
            raise InvalidArguments(f"start must be earliest, latest or positions, not {self.start!r}")
        if isinstance(self.end, str) and self.end not in ("never", "latest"):
            raise InvalidArguments(f"end must be never, latest or seqnos, not {self.end!r}")
        if self.dialect in DRAFTS and self.needs_settings:
            raise InvalidArguments(f"{self.dialect} has no settings: filters, keys_only and history need dcp or upr")
        if self.dialect == "tap":
            self._check_tap()
        if not self.columns:
            raise InvalidArguments("columns is empty; name at least one column")
        unknown = [name for name in self.columns if name not in CHANGES.names]
        if unknown:
            raise InvalidArguments(f"unknown column {', '.join(unknown)}; choose from {', '.join(CHANGES.names)}")
        for name, amount in (("window_bytes", self.window_bytes), ("noop_interval_s", self.noop_interval_s)):
            if amount < 0:
                raise InvalidArguments(f"{name} must be 0 or more, not {amount:g}")
        if self.stall_s <= 0:
            raise InvalidArguments(f"stall_s must be positive, not {self.stall_s:g}")
        if self.patience_s is not None and not self.patience_s > 0:
            raise InvalidArguments(f"patience_s must be positive, not {self.patience_s:g}")
        if self.vbuckets is not None:
            wanted = sorted(set(self.vbuckets))
            if not wanted or wanted[0] < 0 or wanted[-1] > 0xFFFF:
                raise InvalidArguments(f"vbuckets must be one or more numbers from 0 to 65535, not {_ends(wanted)}")
            object.__setattr__(self, "vbuckets", tuple(wanted))
        object.__setattr__(self, "is_named", bool(self.name))
        object.__setattr__(self, "name", self.name or default_name())

    def _check_tap(self) -> None:
        """TAP has neither seqnos nor branches: refuse the settings that it cannot honour instead of ignoring them."""
        impossible = {
            "positions to start from": isinstance(self.start, Mapping)
            and any(type(each) is StreamPosition for each in self.start.values()),
            "ranges that end at a seqno": isinstance(self.end, Mapping),
            "exact ends": bool(self.exact_end),
            "ranges that start at the end": (self.start, self.end) == ("latest", "latest"),
            "history": self.history,
            "replicas": not self.active_only,
            "filters": bool(self.key_filter or self.value_filter or self.persisted_only),
        }
        wanted = [name for name, asked in impossible.items() if asked]
        if wanted:
            raise InvalidArguments(f"tap has no seqnos and cannot do: {', '.join(wanted)}; use dcp")

    @property
    def decoded(self) -> tuple[str, ...]:
        """The columns to decode: the wanted ones, and those needed to cut ranges and to decompress values."""
        needed = [] if self.end == "never" else ["seqno"]
        if "value" in self.columns:
            needed.append("datatype")
        if self.dialect in DRAFTS:
            needed = ["vbucket", "seqno", *needed]
        needed = list(dict.fromkeys(needed))
        return (*self.columns, *(name for name in needed if name not in self.columns))

    @property
    def gives_up_after_s(self) -> float:
        """How long a vbucket may be without a stream. A consumer with an end never waits for ever."""
        if self.patience_s is not None:
            return self.patience_s
        return math.inf if self.end == "never" else PATIENCE_S

    @property
    def selection(self) -> dict[str, str | bool]:
        """The settings that decide which changes and values are left out; without ``history`` superseded versions are.
        A checkpoint is continued with the same ones only."""
        wanted: dict[str, str | bool | None] = {
            "key_filter": self.key_filter,
            "value_filter": self.value_filter,
            "keys_only": self.keys_only,
            "history": self.history,
        }
        return {name: value for name, value in wanted.items() if value}

    @property
    def needs_settings(self) -> bool:
        """Whether the connection needs settings."""
        return bool(self.key_filter or self.value_filter or self.persisted_only or self.history or self.keys_only)

    def upriver_controls(self, *, is_upriver_node: bool, node: str) -> dict[str, str]:
        """The settings for Upriver nodes; raises if another server would need one of them."""
        wanted: dict[str, str] = {}
        if self.key_filter is not None:
            wanted["key_filter"] = self.key_filter
        if self.value_filter is not None:
            wanted["value_filter"] = self.value_filter
        if self.persisted_only:
            wanted["persisted_only"] = "true"
        if self.history:
            wanted["history"] = "true"
        if wanted and not is_upriver_node:
            raise NotSupported(f"{node} is not an Upriver node and does not support {', '.join(wanted)}")
        if not is_upriver_node:
            return {}
        if self.keys_only:
            wanted["keys_only"] = "true"
        if self.exact_end or (self.exact_end is None and self.end != "never"):
            wanted["exact_end"] = "true"
        return wanted


def _ends(numbers: list[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}" if numbers else "an empty list"
