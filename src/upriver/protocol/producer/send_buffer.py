"""Where a connection puts together what it sends: one piece of memory, used again and again.

Bytes that each stream made by itself would be copied a second time when they are joined. And fresh memory for each
piece is slow: the system clears its pages, and nothing of it is in the processor's cache when it is sent.
"""

from typing import Final

from upriver.wire import Buffer

#: So little is worth a copy: whoever holds on to it shall not hold on to all the memory.
COPIED_BYTES: Final = 64 * 1024


class SendBuffer:
    """Bytes that will be sent, in their order."""

    __slots__ = ("_memory", "_room_bytes", "size")

    def __init__(self, room_bytes: int) -> None:
        self._room_bytes = room_bytes
        self._memory = memoryview(bytearray(room_bytes))
        #: How many bytes were put and not taken.
        self.size = 0

    @property
    def room(self) -> memoryview:
        """What is free behind them; who has filled some of it from its start says how much."""
        return self._memory[self.size :]

    def filled(self, count: int) -> None:
        """So many bytes stand in what was free."""
        self.size += count

    def put(self, data: Buffer) -> None:
        """Put something behind them, however large it is."""
        end = self.size + len(data)
        if end > len(self._memory):
            larger = memoryview(bytearray(end))
            larger[: self.size] = self._memory[: self.size]
            self._memory = larger
        self._memory[self.size : end] = data
        self.size = end

    def clear(self) -> None:
        """Forget what was put."""
        self.size = 0

    def take(self) -> bytes | memoryview:
        """All that was put. If it is a view it is overwritten by what is put next, unless ``let_go`` comes before."""
        taken = self._memory[: self.size]
        self.size = 0
        if len(self._memory) > self._room_bytes:
            self.let_go()
        return bytes(taken) if len(taken) <= COPIED_BYTES else taken

    def let_go(self) -> None:
        """Somebody holds on to what was taken: what comes next gets other memory."""
        assert not self.size, "something was put since"
        self._memory = memoryview(bytearray(self._room_bytes))
