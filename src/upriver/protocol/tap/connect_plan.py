"""What a TAP connect asks for, in plain words: which vbuckets, from where, and how."""

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

    #: An acknowledgement is asked for with every so many messages.
    ack_interval: int = 1000
    #: So many messages may be unacknowledged, and so many bytes.
    window_messages_max: int = 10_000
    window_bytes_max: int = 8 * 1024 * 1024
    #: A message that was refused for the moment is sent again after so long.
    backoff_s: float = 5.0
    #: A connection that is idle for so long is asked whether anybody is there.
    noop_interval_s: float = 200.0
    #: The place of a client that has gone is kept for so long.
    keep_alive_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TapPlan:
    """The flags of a connect, and what follows from them together."""

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
    #: What exists and is older than this second of the epoch is left out. At 0 a consumer starts over with everything.
    since: int
    #: Nothing that exists is sent.
    future_only: bool
    #: The marks of every mutation.
    tap_flags: int

    @property
    def copies(self) -> bool:
        """It ends with a copy of what there is; so nothing can go in circles, and nothing is left out for that."""
        return self.dump or self.takeover

    @property
    def ends(self) -> bool:
        """The connection is closed when everything is sent."""
        return self.copies


def plan_of(request: tap.Connect, now: float) -> TapPlan:
    """What a connect asks for; one that contradicts itself is refused."""
    flags = int(request.flags)
    if flags & ~_KNOWN:
        raise InvalidArguments(f"there is no TAP flag 0x{flags & ~_KNOWN:x}")
    takeover, keys_only = bool(flags & ConnectFlag.TAKEOVER_VBUCKETS), bool(flags & ConnectFlag.REQUEST_KEYS_ONLY)
    registered = bool(flags & ConnectFlag.REGISTERED_CLIENT)
    if takeover and request.vbuckets is None:
        raise InvalidArguments("a takeover needs a list of vbuckets; an empty one means all")
    if takeover and not request.name:
        raise InvalidArguments(
            "a takeover needs a name: who is cut off in it must come back under that, and nobody else"
        )
    if takeover and keys_only:
        raise InvalidArguments("a takeover without the values would lose them")
    if registered and not request.name:
        raise InvalidArguments("a registered client needs a name to come back under")
    dump, date = bool(flags & ConnectFlag.DUMP) and not takeover, request.backfill_date
    if takeover or (date is None and dump):
        date = 0
    network_order = NETWORK_BYTE_ORDER if flags & ConnectFlag.FIX_FLAG_BYTEORDER else 0
    # A date in the future means from now on, and nothing that exists is as new as the next second.
    since = int(now) + 1 if date is None or date > now else date
    return TapPlan(
        flags=flags,
        vbuckets=tuple(dict.fromkeys(request.vbuckets)) if request.vbuckets else None,
        backfill_date=request.backfill_date,
        acks=bool(flags & ConnectFlag.SUPPORT_ACK),
        dump=dump,
        takeover=takeover,
        keys_only=keys_only,
        checkpoints=bool(flags & ConnectFlag.CHECKPOINT),
        registered=registered,
        since=since,
        future_only=since > now,
        tap_flags=network_order | (NO_VALUE if keys_only else 0),
    )
