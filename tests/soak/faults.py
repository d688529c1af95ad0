"""What happens to the cluster while clients write."""

import asyncio
import random
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from tests.soak.cluster import VBUCKETS, SoakNode
from tests.soak.ledger import Ledger, contents_after
from tests.soak.writer import SoakWriter
from tests.support.raw_client import Packet, RawClient, packet
from upriver.client import Mover
from upriver.errors import UpriverError
from upriver.protocol.move import Phase

AUTH, SET, GET_VBUCKET, NOOP = 0x21, 0x01, 0x3E, 0x0A
OPEN, STREAM, STREAM_END, MUTATION = 0x50, 0x53, 0x55, 0x57
SUCCESS: Final = 0
ACTIVE: Final = 1
MOVE_PATIENCE_S: Final = 30.0
FULL_S_MAX: Final = 5.0
STREAM_END_S_MAX: Final = 10.0


class Faults:
    """One kind of trouble after the other, chosen at random."""

    def __init__(
        self, nodes: Sequence[SoakNode], writers: Sequence[SoakWriter], ledger: Ledger, chance: random.Random
    ) -> None:
        self._nodes, self._writers, self._ledger, self._chance = nodes, writers, ledger, chance
        #: The faults so far, in their order.
        self.history: list[str] = []
        self._striking = False
        #: How often a node could not write because its disk was full.
        self.failed_commits = 0
        #: What a client was allowed without the role for it.
        self.breaches: list[str] = []
        self._logins = 0
        self._kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "kill -9": self._kill,
            "move": self._move,
            "kill -9 in a move": self._kill_in_a_move,
            "disconnect": self._disconnect,
            "full disk": self._fill_the_disk,
            "login": self._log_in_again,
        }

    async def strike(self) -> None:
        """Let one thing happen, and wait until it is over."""
        self.history.append(self._chance.choice(list(self._kinds)))
        self._striking = True
        await self._kinds[self.history[-1]]()
        self._striking = False

    def watch(self) -> Callable[[], str]:
        """A function that names what has happened since now, including what was happening now."""
        first = len(self.history) - self._striking
        return lambda: ", ".join(self.history[first:])

    async def _kill(self, node: SoakNode | None = None) -> None:
        node = node or self._chance.choice(self._nodes)
        async with node.in_use:
            await asyncio.to_thread(node.kill)
            await asyncio.sleep(self._chance.uniform(0, 2))
            await asyncio.to_thread(node.start)

    async def _move(self) -> None:
        await self._carry_out(*await self._chosen_move())

    async def _chosen_move(self) -> tuple[SoakNode, SoakNode, list[int]]:
        """From where, to where, and which of the vbuckets that the first owns."""
        source, destination = self._chance.sample(list(self._nodes), 2)
        owned = await asyncio.to_thread(active_vbuckets, source)
        return source, destination, self._chance.sample(owned, min(len(owned), VBUCKETS // 2))

    async def _carry_out(self, source: SoakNode, destination: SoakNode, vbuckets: list[int]) -> None:
        """Move vbuckets until all have moved."""
        left = set(vbuckets)
        while left:
            mover = Mover(source.as_user("admin"), destination.as_user("admin"), left, patience_s=MOVE_PATIENCE_S)
            try:
                left -= {step.vbucket for step in await mover.carry_out() if step.phase is Phase.MOVED}
            except UpriverError:  # a node is down
                await asyncio.sleep(0.2)
            finally:
                await mover.close()

    async def _kill_in_a_move(self) -> None:
        move = await self._chosen_move()  # which asks a node that must be there
        async with asyncio.TaskGroup() as group:
            group.create_task(self._carry_out(*move))
            await asyncio.sleep(self._chance.uniform(0, 1))
            group.create_task(self._kill())

    async def _disconnect(self) -> None:
        for writer in self._chance.sample(list(self._writers), self._chance.randint(1, len(self._writers))):
            await writer.disconnect()

    async def _fill_the_disk(self) -> None:
        """No file of the node can grow, until it has failed to write and for a while after that."""
        node = self._chance.choice(self._nodes)
        async with node.in_use:
            failed = node.failed_commits
            node.limit_files(node.largest_file)
            try:
                end = time.monotonic() + FULL_S_MAX
                while node.failed_commits == failed and time.monotonic() < end:  # a node that owns little writes little
                    await asyncio.sleep(0.1)
                await asyncio.sleep(self._chance.uniform(0, 2))
            finally:
                node.limit_files(None)
            self.failed_commits += node.failed_commits - failed

    async def _log_in_again(self) -> None:
        """One connection logs in again and again: after each login it may do what the new user may."""
        node = self._chance.choice(self._nodes)
        async with node.in_use:
            self._logins += 1
            await asyncio.to_thread(self._log_in_on, node, b"login-%d" % self._logins)

    def _log_in_on(self, node: SoakNode, key: bytes) -> None:
        owned = active_vbuckets(node)
        if not owned:
            return
        with RawClient(node.port) as client:
            for user, password in (
                ("writer", "writer"),
                ("reader", "reader"),
                ("writer", "writer"),
                ("writer", "wrong"),
            ):
                login = client.ask(packet(AUTH, b"", b"PLAIN", f"\0{user}\0{password}".encode()))
                if (login.status == SUCCESS) is not (user == password):
                    self.breaches.append(f"the login of {user} with the password {password}: {login.status:#x}")
                answer = self._set(client, key, owned[0])
                if answer.status == SUCCESS and (user, password) != ("writer", "writer"):
                    self.breaches.append(f"{user} with the password {password} wrote a key")
        with RawClient(node.port) as client:
            self._stream_through_a_login(client, key, owned[0])

    def _stream_through_a_login(self, client: RawClient, name: bytes, vbucket: int) -> None:
        """A stream that an administrator began must end when a reader logs in on its connection."""
        client.ask(packet(AUTH, b"", b"PLAIN", b"\0admin\0admin"))
        client.ask(packet(OPEN, struct.pack(">II", 0, 1), name))
        everything = struct.pack(">IIQQQQQ", 0, 0, 0, 2**64 - 1, 0, 0, 0)
        if client.ask(packet(STREAM, everything, vbucket=vbucket)).status != SUCCESS:
            return  # the vbucket moved before
        client.send(packet(AUTH, b"", b"PLAIN", b"\0reader\0reader"))
        end = time.monotonic() + STREAM_END_S_MAX
        while client.take().opcode != STREAM_END:
            if time.monotonic() > end:
                self.breaches.append(f"a stream of vbucket {vbucket} goes on after a login without the role for it")
                return
        client.send(packet(NOOP))
        while (found := client.take()).opcode != NOOP:
            if found.opcode == MUTATION:
                self.breaches.append(f"a mutation of vbucket {vbucket} came after the end of its stream")

    @staticmethod
    def _set(client: RawClient, key: bytes, vbucket: int) -> Packet:
        value = contents_after(1)
        assert value is not None
        return client.ask(packet(SET, struct.pack(">II", 0, 0), key, value, vbucket=vbucket))


def active_vbuckets(node: SoakNode) -> list[int]:
    """The vbuckets that the node owns."""
    with RawClient(node.port) as client:
        login = client.ask(packet(AUTH, b"", b"PLAIN", b"\0admin\0admin"))
        assert login.status == SUCCESS, login
        found = []
        for vbucket in range(VBUCKETS):
            answer = client.ask(packet(GET_VBUCKET, vbucket=vbucket))
            if answer.status == SUCCESS and int.from_bytes(answer.extras + answer.value, "big") == ACTIVE:
                found.append(vbucket)
        return found
