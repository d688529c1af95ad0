"""What a TAP connect asks for: which vbuckets, from where, and how."""

from dataclasses import dataclass
from typing import Final

from upriver.errors import InvalidArguments
from upriver.wire import tap
from upriver.wire.codec import NETWORK_BYTE_ORDER, NO_VALUE
from upriver.wire.dialects.tap import ConnectFlag

_KNOWN: Final = sum(int(flag) for flag in ConnectFlag)


@dataclass(frozen=True, slots=True)
class TapSettings:
    """How a node serves its TAP connections."""

    #: An acknowledgement is requested every this many messages.
    ack_interval: int = 1000
    #: The maximum number of unacknowledged messages, and of their bytes.
    window_messages_max: int = 10_000
    window_bytes_max: int = 8 * 1024 * 1024
    #: A message that was refused temporarily is sent again after this time.
    backoff_s: float = 5.0
    #: An idle connection gets a noop after this time.
    noop_interval_s: float = 200.0
    #: The position of a client that has left is kept for this time.
    keep_alive_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TapPlan:
    """The flags of a connect, and what they mean together."""

    flags: int
    #: None for all.
    vbuckets: tuple[int, ...] | None
    backfill_date: int | None
    acks: bool
    dump: bool
    takeover: bool
    keys_only: bool
    checkpoints: bool
    registered: bool
    #: Existing changes before this second of the epoch are left out. At 0 a consumer starts over with everything.
    since: int
    #: No existing change is sent.
    future_only: bool
    #: The flags of every mutation.
    tap_flags: int

    @property
    def copies(self) -> bool:
        """It ends with a copy of everything. A copy cannot go in circles, so no change is left out for its hops."""
        return self.dump or self.takeover

    @property
    def ends(self) -> bool:
        """The connection is closed when everything is sent."""
        return self.copies


def plan_of(request: tap.Connect, now: float) -> TapPlan:
    """What a connect asks for. All flags can be combined: one that contradicts a takeover gives way to it."""
    flags = int(request.flags)
    if flags & ~_KNOWN:
        raise InvalidArguments(f"unknown TAP flag 0x{flags & ~_KNOWN:x}")
    takeover = bool(flags & ConnectFlag.TAKEOVER_VBUCKETS)
    # Keys-only is a preference: the successor of a vbucket needs its values.
    keys_only = bool(flags & ConnectFlag.REQUEST_KEYS_ONLY) and not takeover
    date = request.backfill_date or 0
    # A date in the future means live changes only: no existing change is as new as the next second.
    since = 0 if takeover else min(date, int(now) + 1)
    network_order = NETWORK_BYTE_ORDER if flags & ConnectFlag.FIX_FLAG_BYTEORDER else 0
    return TapPlan(
        flags=flags,
        vbuckets=tuple(dict.fromkeys(request.vbuckets)) if request.vbuckets else None,
        backfill_date=request.backfill_date,
        acks=bool(flags & ConnectFlag.SUPPORT_ACK),
        dump=bool(flags & ConnectFlag.DUMP) and not takeover,
        takeover=takeover,
        keys_only=keys_only,
        checkpoints=bool(flags & ConnectFlag.CHECKPOINT),
        registered=bool(flags & ConnectFlag.REGISTERED_CLIENT),
        since=since,
        future_only=since > now,
        tap_flags=network_order | (NO_VALUE if keys_only else 0),
    )
