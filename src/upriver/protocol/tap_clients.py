"""Who has connected under which name, and where he stands.

A client that was there before goes on with what it had not acknowledged: for some minutes, or, if it registered, until
it is deregistered. What is kept of it is a uuid and a seqno for each vbucket, and nothing of what it has not read: that
is in the history, in memory or on disk. Where the history no longer leads on from there, the client starts over.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from upriver.errors import TemporaryFailure
from upriver.model import StreamPosition
from upriver.protocol.tap_plan import TapPlan

#: Names beyond so many are forgotten, those that left first; registered ones beyond so many are refused instead.
CLIENTS_MAX: Final = 1000
#: A place on no branch at all: no history leads on from it.
LOST: Final = StreamPosition.at(0, 1)


@dataclass(slots=True, eq=False)
class TapClient:
    """What is known of a name."""

    name: str
    created: float
    flags: int = 0
    #: What it has asked for last: its places mean no more than that.
    plan: TapPlan | None = None
    #: It has not told a name: the node has made one up.
    anonymous: bool = False
    registered: bool = False
    connected: bool = False
    #: How often it came back.
    reconnects: int = 0
    #: It has got all that it came for, the last time.
    done: bool = False
    #: When it went; None while it is connected.
    left_at: float | None = None
    positions: dict[int, StreamPosition] = field(default_factory=dict)
    #: Where it stood when it began anew: should the history have gone back since, it starts over.
    outdated: dict[int, StreamPosition] = field(default_factory=dict)
    #: It goes on with all vbuckets: one that it has no place in was not there when it left.
    knew_all: bool = False
    #: What its last connection has sent, once that is gone: changes, all messages, and bytes.
    changes_sent: int = 0
    messages_sent: int = 0
    bytes_sent: int = 0


class TapClients:
    """All names, connected or not."""

    def __init__(self, keep_alive_s: float) -> None:
        self.keep_alive_s = keep_alive_s
        self._by_name: dict[str, TapClient] = {}

    def __iter__(self) -> Iterator[TapClient]:
        return iter(list(self._by_name.values()))

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def away(self) -> bool:
        """Will somebody be forgotten if he does not come back?"""
        return any(client.left_at is not None and not client.registered for client in self._by_name.values())

    def get(self, name: str) -> TapClient | None:
        """The client of this name."""
        return self._by_name.get(name)

    def restore(self, client: TapClient) -> None:
        """Take back one that was known before a restart."""
        self._by_name[client.name] = client

    def connected(self, name: str, plan: TapPlan, now: float, *, anonymous: bool = False) -> TapClient:
        """Somebody connects: the client that he is, with the places that still count."""
        self.expire(now)
        client = self._by_name.get(name)
        if plan.registered and not (client is not None and client.registered):
            self._check_registered()
        if client is None:
            self._make_room()
            client = self._by_name[name] = TapClient(name, now, anonymous=anonymous)
        else:
            client.reconnects += 1
            client.outdated = {}
            client.knew_all = client.plan is not None and client.plan.vbuckets is None
            if client.plan is None or not client.plan.covers(plan) or (plan.dump and client.done):
                # It asks for more than it was sent, or for everything again.
                client.outdated, client.positions, client.knew_all = client.positions, {}, False
            else:
                plan = plan.going_on(client.plan)
        client.done = False
        client.plan, client.flags, client.connected, client.left_at = plan, plan.flags, True, None
        client.registered = client.registered or plan.registered
        return client

    def left(self, client: TapClient, positions: dict[int, StreamPosition], now: float, *, done: bool) -> None:
        """It is gone; ``done`` if it has got everything that it came for."""
        client.connected, client.left_at, client.done = False, now, done
        client.positions |= positions
        if self._by_name.get(client.name) is client and not client.registered and (done or not self.keep_alive_s):
            del self._by_name[client.name]

    def deregister(self, name: str) -> TapClient | None:
        """Forget a registered client; None if there is none."""
        client = self._by_name.get(name)
        if client is None or not client.registered:
            return None
        client.registered = False
        del self._by_name[name]
        return client

    def expire(self, now: float) -> None:
        """Forget those that have been away for too long."""
        for client in self:
            away = client.left_at is not None and now - client.left_at >= self.keep_alive_s
            if away and not client.registered:
                del self._by_name[client.name]

    def _check_registered(self) -> None:
        if sum(client.registered for client in self._by_name.values()) >= CLIENTS_MAX:
            raise TemporaryFailure(f"{CLIENTS_MAX} TAP clients are registered already: deregister some")

    def _make_room(self) -> None:
        if len(self._by_name) < CLIENTS_MAX:
            return
        gone = [client for client in self if client.left_at is not None and not client.registered]
        if gone:
            del self._by_name[min(gone, key=lambda client: client.left_at or 0.0).name]
