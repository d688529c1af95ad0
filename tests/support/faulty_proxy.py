"""A network between client and node that fails on command: it cuts, delays, refuses, holds connections back and
swallows what they say."""

import asyncio
import contextlib
import random
from collections.abc import Callable


class Proxy:
    """Passes bytes on to a port, in pieces of any size, until a test asks for a fault."""

    def __init__(self, target_port: int, seed: int) -> None:
        self._target = target_port
        self._random = random.Random(seed)
        self._server: asyncio.Server
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._silent: set[asyncio.StreamWriter] = set()
        #: New connections are dropped at once.
        self.refusing = False
        #: Hears what passes, with the writer that it goes to: one for each direction of each connection.
        self.overhear: Callable[[asyncio.StreamWriter, bytes], object] | None = None
        #: Each connection is cut after this many bytes from the node; None for never.
        self.cut_after_bytes: int | None = None
        self.cuts = 0
        self.port = 0

    async def __aenter__(self) -> "Proxy":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Break everything that is open."""
        for writer in list(self._open):
            self._abort(writer)

    def fall_silent(self) -> None:
        """Swallow whatever is said over what is open now, as a firewall does that has forgotten it."""
        self._silent.update(self._open)

    def _abort(self, writer: asyncio.StreamWriter) -> None:
        if writer in self._open:
            self._open.discard(writer)
            self.cuts += 1
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._open.add(writer)
        # Held back for a while each, so that connections that were made in one order arrive in another.
        await asyncio.sleep(self._random.uniform(0, 0.02))
        if self.refusing or writer not in self._open:
            self._abort(writer)
            return
        try:
            node_reader, node_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            self._abort(writer)
            return
        self._open.add(node_writer)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pass_on(reader, node_writer, writer, None))
            group.create_task(self._pass_on(node_reader, writer, node_writer, self.cut_after_bytes))

    async def _pass_on(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        other: asyncio.StreamWriter,
        cut_after_bytes: int | None,
    ) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := await reader.read(self._random.choice((7, 100, 4096, 65536))):
                if writer in self._silent:
                    continue
                if cut_after_bytes is not None and passed + len(data) > cut_after_bytes:
                    writer.write(data[: cut_after_bytes - passed])
                    break
                passed += len(data)
                if self.overhear is not None:
                    self.overhear(writer, data)
                writer.write(data)
                await writer.drain()
        await asyncio.sleep(0)
        self._abort(writer)
        self._abort(other)
