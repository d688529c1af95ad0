"""Moves and replicates vbuckets between two nodes: runs ``upriver.protocol.move`` over real connections.

Each takeover has its own pair of connections, named after its vbucket. A node closes an older connection with the same
name, so a new mover, in any process, replaces an interrupted one. A few vbuckets move at a time. Replication runs until
it is stopped, and all its vbuckets share one pair.

The mover passes bytes on unchanged, in large pieces. It stops reading from the source while the destination is slow.
"""

import asyncio
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Self

from upriver.client.cluster.map_updates import MapUpdates
from upriver.client.transport.address import Address
from upriver.client.transport.backoff import PATIENCE_S, Backoff
from upriver.client.transport.connection import Connection
from upriver.errors import (
    AccessDenied,
    AuthenticationFailed,
    KeyNotFound,
    LoginImpossible,
    OptionError,
    UpriverError,
)
from upriver.protocol.move import Announce, Connect, Disconnect, Goal, Link, Move, MoverSteps, Phase, Rest, Send

PARALLEL: Final = 4
RECEIVE_BYTES: Final = 512 * 1024
#: The longest pause before it requests a stream again that ended or was refused temporarily.
REST_S_MAX: Final = 1.0
#: Errors that no retry can fix.
_HOPELESS: Final = (AccessDenied, AuthenticationFailed, KeyNotFound, LoginImpossible)
#: Phases that count as progress. The earlier ones may repeat after each lost connection.
_ONWARD: Final = frozenset(Phase) - {Phase.WAITING, Phase.ASKING, Phase.PREPARING, Phase.RESTING}


@dataclass(frozen=True, slots=True)
class Step:
    """The state of one vbucket's move."""

    vbucket: int
    phase: Phase
    #: Why it failed, or why it waits.
    reason: str = ""
    #: The number of bytes that its connections have passed on.
    bytes_passed_on: int = 0
    #: The role that the source has requested from the destination and not confirmed yet: `pending`, later `active`.
    told: str = ""


class Mover:
    """Moves vbuckets from the first node of one address to the first node of another.

    ::

        steps = await Mover("a:11210", "b:11210", range(512)).carry_out()

    After an interruption, run it again: it continues where it was. With ``Goal.UNDO`` it reverts an interrupted
    takeover, after it has asked the destination. If the destination cannot be reached, a dead source stays dead.
    """

    def __init__(
        self,
        source: str | Address,
        destination: str | Address,
        vbuckets: Iterable[int],
        goal: Goal = Goal.TAKE_OVER,
        *,
        parallel: int = PARALLEL,
        patience_s: float = PATIENCE_S,
        on_step: Callable[[Step], object] | None = None,
    ) -> None:
        """``patience_s`` is the longest time without progress before it gives up; ``on_step`` gets each step."""
        self.addresses = {Link.SOURCE: Address.parse(source), Link.DESTINATION: Address.parse(destination)}
        if self._successor == str(self.addresses[Link.SOURCE].endpoints[0]):
            raise OptionError(
                "to", self._successor, "source and destination are the same node; choose another destination"
            )
        self.vbuckets = tuple(dict.fromkeys(vbuckets))
        self.goal = goal
        self.patience_s = patience_s
        self.on_step = on_step
        self.maps = MapUpdates(self.addresses[Link.SOURCE], self.addresses[Link.DESTINATION])
        self._slots = asyncio.Semaphore(max(1, parallel))
        self._stopping = asyncio.Event()
        self._pairs: list[_Pair] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def carry_out(self) -> list[Step]:
        """Move all vbuckets and return the state of each. Replication runs until ``stop``."""
        if self.goal is Goal.TAKE_OVER:
            await self.maps.learn()
        if self.goal is Goal.REPLICATE:
            # The same command replaces an interrupted one; a command for other vbuckets does not.
            these = zlib.crc32(repr(self.vbuckets).encode())
            return await self._run_pair(f"upriver-replicator:{self._successor}:{these:08x}", self.vbuckets)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._run_one(number)) for number in self.vbuckets]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the first has stopped the others
        return [step for task in tasks for step in task.result()]

    def stop(self) -> None:
        """Stop as soon as possible; a later run continues the rest."""
        self._stopping.set()

    async def close(self) -> None:
        """Stop and close all connections."""
        self.stop()
        for pair in self._pairs:
            await pair.close()

    @property
    def bytes_passed_on(self) -> int:
        """The number of bytes that all connections have passed on."""
        return sum(pair.steps.bytes_passed_on for pair in self._pairs)

    async def _run_one(self, vbucket: int) -> list[Step]:
        async with self._slots:
            if self._stopping.is_set():
                return [Step(vbucket, Phase.WAITING, "stopped before it started")]
            # The source stores this name as its successor, and only this name may complete the takeover.
            found = await self._run_pair(f"upriver-mover:{vbucket}:{self._successor}", (vbucket,))
            if found[0].phase is Phase.MOVED:
                await self.maps.settle(vbucket, self.patience_s)
            return found

    @property
    def _successor(self) -> str:
        return str(self.addresses[Link.DESTINATION].endpoints[0])

    async def _run_pair(self, name: str, vbuckets: tuple[int, ...]) -> list[Step]:
        pair = _Pair(self, name, vbuckets)
        self._pairs.append(pair)
        try:
            await pair.run(self._stopping)
        finally:
            await pair.close()
        return [pair.step(move) for move in pair.steps.moves.values()]


class _Pair:
    """A pair of connections and the steps between them."""

    def __init__(self, owner: Mover, name: str, vbuckets: tuple[int, ...]) -> None:
        self.owner = owner
        takes_over = owner.goal is Goal.TAKE_OVER
        self.steps = MoverSteps(
            name,
            vbuckets,
            owner.goal,
            new_map=owner.maps.moved if takes_over else None,
            has_others=takes_over and owner.maps.has_others,
            on_phase=self._on_phase,
        )
        self._connections: dict[Link, Connection] = {}
        self._backoffs = {link: Backoff() for link in Link}
        #: Never reset: a peer that ends each stream at once would cause many requests a second.
        self._rests: dict[int, Backoff] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        #: Why a node is not connected.
        self._missing: dict[Link, str] = {}
        self._failure: Exception | None = None
        self._changed = asyncio.Event()
        self._draining = False
        self._passed_on = 0
        self._onward_at = asyncio.get_running_loop().time()

    def step(self, move: Move) -> Step:
        """Return the public state of a move."""
        told = "" if move.told is None else move.told.name.lower()
        return Step(move.vbucket, move.phase, move.reason, self.steps.bytes_passed_on, told)

    async def run(self, stopping: asyncio.Event) -> None:
        """Run until all vbuckets are done, nothing makes progress, or the mover is stopped."""
        self.steps.start()
        self._act()
        stop = asyncio.create_task(stopping.wait())
        try:
            while not self.steps.over and not stopping.is_set():
                if self._failure is not None:
                    raise self._failure
                left_s = self._left_s()
                if left_s <= 0:
                    self._give_up()
                    return
                self._changed.clear()
                changed = asyncio.create_task(self._changed.wait())
                await asyncio.wait({changed, stop}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
        finally:
            stop.cancel()

    def _left_s(self) -> float:
        """The time left until the mover gives up."""
        now = asyncio.get_running_loop().time()
        # Bytes of a request that is refused repeatedly are not progress.
        going = [move for move in self.steps.moves.values() if not move.phase.over and not move.refusal]
        streaming = all(move.phase is Phase.STREAMING for move in going)
        idle = self.owner.goal is Goal.REPLICATE and streaming  # an idle replication is healthy
        if going and (idle or self.steps.bytes_passed_on != self._passed_on):
            self._onward_at = now
        self._passed_on = self.steps.bytes_passed_on
        return self._onward_at + self.owner.patience_s - now

    def _give_up(self) -> None:
        missing = "; ".join(f"cannot reach the {link.value}: {why}" for link, why in self._missing.items())
        for move in self.steps.moves.values():
            if not move.phase.over:
                why = missing or move.refusal or move.reason or move.phase.value
                move.reason = f"no progress for {self.owner.patience_s:g} s: {why}"

    async def close(self) -> None:
        """Close both connections."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            await connection.close()

    # Actions of the steps

    def _act(self) -> None:
        while actions := self.steps.actions():
            for action in actions:
                match action:
                    case Connect(link):
                        self._spawn(self._connect(link))
                    case Disconnect(link):
                        self._drop(link)
                    case Send(link, data):
                        self._send(link, bytes(data))  # copied: the buffer is reused, and the write may wait
                    case Announce(vbucket, encoded):
                        self._spawn(self._announce(vbucket, encoded))
                    case Rest(vbucket):
                        self._spawn(self._rest(vbucket))
        if self.steps.over:
            self._changed.set()

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, link: Link) -> None:
        address, backoff = self.owner.addresses[link], self._backoffs[link]
        if backoff.attempts:
            await asyncio.sleep(backoff.pause_s())
        else:
            backoff.pause_s()  # the first attempt is made at once
        try:
            connection = await Connection.open(address.endpoints[0], address, receive_bytes=RECEIVE_BYTES)
        except _HOPELESS as error:
            self._failure = error
            self._changed.set()
            return
        except UpriverError as error:
            self._missing[link] = str(error)
            self.steps.lost(link, str(error))
            self._act()
            return
        self._missing.pop(link, None)
        self._connections[link] = connection
        connection.stream_to(_PairReceiver(self, link, connection))
        self.steps.connected(link)
        self._act()

    def _drop(self, link: Link) -> None:
        connection = self._connections.pop(link, None)
        if connection is not None:
            connection.abort()

    def _send(self, link: Link, data: bytes) -> None:
        connection = self._connections.get(link)
        if connection is None:
            return
        connection.write(data)
        if link is Link.DESTINATION and connection.backed_up and not self._draining:
            self._draining = True
            self._spawn(self._hold_back(connection))

    async def _hold_back(self, destination: Connection) -> None:
        """Stop reading from the source until the destination has read what it was sent."""
        source = self._connections.get(Link.SOURCE)
        if source is not None:
            source.pause()
        try:
            await destination.drain()
        except UpriverError:
            pass  # ``lost`` restarts the move
        finally:
            self._draining = False
            if source is not None:
                source.resume()

    async def _announce(self, vbucket: int, encoded: bytes) -> None:
        await self.owner.maps.push_to_others(encoded)
        self.steps.announced(vbucket, encoded)
        self._act()

    async def _rest(self, vbucket: int) -> None:
        await asyncio.sleep(self._rests.setdefault(vbucket, Backoff(longest_s=REST_S_MAX)).pause_s())
        self.steps.rested(vbucket)
        self._act()

    # Events of the connections

    def received(self, link: Link, connection: Connection, data: memoryview) -> None:
        """Bytes came from one node."""
        if self._connections.get(link) is connection:
            self.steps.received(link, data)
            self._act()

    def lost(self, link: Link, connection: Connection, error: UpriverError) -> None:
        """A connection was lost."""
        if self._connections.get(link) is connection:
            del self._connections[link]
            self.steps.lost(link, str(error))
            self._act()

    def _on_phase(self, move: Move) -> None:
        if move.phase in _ONWARD and not move.refusal:
            self._onward_at = asyncio.get_running_loop().time()
            for backoff in self._backoffs.values():
                backoff.reset()
        if self.owner.on_step is not None:
            try:
                self.owner.on_step(self.step(move))
            except Exception as error:  # raised to the caller of the mover, not logged by the event loop
                self._failure = error
        self._changed.set()


class _PairReceiver:
    """Passes the events of one connection to its pair."""

    def __init__(self, pair: _Pair, link: Link, connection: Connection) -> None:
        self._pair = pair
        self._link = link
        self._connection = connection

    def receive(self, data: memoryview) -> None:
        """Pass on received bytes."""
        self._pair.received(self._link, self._connection, data)

    def lost(self, error: UpriverError) -> None:
        """Pass on the loss."""
        self._pair.lost(self._link, self._connection, error)
