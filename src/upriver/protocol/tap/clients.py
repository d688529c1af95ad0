"""The TAP clients that a node knows by name, and their positions.

A client that reconnects resumes behind what it has acknowledged: for some minutes, or, if it registered, until it is
deregistered. Only one position per vbucket is kept, and nothing of what the client has not read: that is in the
history, in memory or on disk. Where the history no longer continues from a position, the client starts over.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from upriver.errors import TemporaryFailure
from upriver.protocol.tap.connect_plan import TapPlan
from upriver.protocol.tap.position import TapPosition
from upriver.protocol.tap.position_table import PositionTable

#: With more names, those that left first are forgotten; more registered clients are refused.
CLIENTS_MAX: Final = 1000


@dataclass(slots=True, eq=False)
class TapClient:
    """What is known of one name."""

    name: str
    created: float
    flags: int = 0
    #: What it asked for last.
    plan: TapPlan | None = None
    #: It sent no name, and the node made one up.
    anonymous: bool = False
    registered: bool = False
    connected: bool = False
    #: How often it reconnected.
    reconnects: int = 0
    #: Its last connection sent everything that it asked for.
    done: bool = False
    #: When it left; None while it is connected.
    left_at: float | None = None
    table: PositionTable = field(default_factory=PositionTable)
    #: Returns the positions that its last connection has left and that are not in the table yet.
    unsettled: Callable[[], Mapping[int, TapPosition]] | None = None
    #: Its position in a vbucket that did not exist when it left, if it has ever asked for all vbuckets.
    elsewhere: TapPosition | None = None
    #: What its last connection has sent, once that is closed: changes, all messages, and bytes.
    changes_sent: int = 0
    messages_sent: int = 0
    bytes_sent: int = 0

    @property
    def positions(self) -> PositionTable:
        """Its position in each vbucket."""
        self.settle()
        return PositionTable(self.table.packed)

    def settle(self) -> None:
        """Pack what its last connection has left. That takes milliseconds, so it can be done after the client left."""
        if self.unsettled is not None:
            self.table = self.table.with_positions(self.unsettled())
            self.unsettled = None


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
        """Whether a client will be forgotten if it does not reconnect."""
        return any(client.left_at is not None and not client.registered for client in self._by_name.values())

    def get(self, name: str) -> TapClient | None:
        """The client of this name."""
        return self._by_name.get(name)

    def restore(self, client: TapClient) -> None:
        """Add a client that was known before a restart."""
        self._by_name[client.name] = client

    def connected(self, name: str, plan: TapPlan, now: float, *, anonymous: bool = False) -> TapClient:
        """A client connects: return it with its positions."""
        self.expire(now)
        client = self._by_name.get(name)
        if plan.registered and not (client is not None and client.registered):
            self._check_registered()
        if client is None:
            self._make_room()
            client = self._by_name[name] = TapClient(name, now, anonymous=anonymous)
        else:
            client.reconnects += 1
        client.done = False
        client.plan, client.flags, client.connected, client.left_at = plan, plan.flags, True, None
        client.registered = client.registered or plan.registered
        return client

    def left(
        self,
        client: TapClient,
        positions: Callable[[], Mapping[int, TapPosition]],
        now: float,
        *,
        elsewhere: TapPosition | None = None,
        done: bool,
    ) -> None:
        """A client is gone; ``done`` if it was sent everything that it asked for."""
        client.connected, client.left_at, client.done = False, now, done
        client.settle()
        client.unsettled = positions
        client.elsewhere = elsewhere
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
        """Forget the clients that have been away for too long."""
        for client in self:
            away = client.left_at is not None and now - client.left_at >= self.keep_alive_s
            if away and not client.registered:
                del self._by_name[client.name]

    def _check_registered(self) -> None:
        if sum(client.registered for client in self._by_name.values()) >= CLIENTS_MAX:
            raise TemporaryFailure(f"{CLIENTS_MAX} TAP clients are registered, which is the maximum: deregister some")

    def _make_room(self) -> None:
        if len(self._by_name) < CLIENTS_MAX:
            return
        gone = [client for client in self if client.left_at is not None and not client.registered]
        if gone:
            del self._by_name[min(gone, key=lambda client: client.left_at or 0.0).name]
