"""The memory in which a connection assembles what it sends, used again and again.

Bytes that each stream allocated for itself would be copied a second time when they are joined. Fresh memory is slow as
well: the system clears its pages, and none of it is in the processor's cache when it is sent.
"""

from typing import Final

from upriver.wire import Buffer

#: Up to this size the bytes are copied, so that a slow transport does not hold on to the whole buffer.
COPIED_BYTES: Final = 64 * 1024


class SendBuffer:
    """Bytes to send, in their order."""

    __slots__ = ("_memory", "_room_bytes", "size")

    def __init__(self, room_bytes: int) -> None:
        self._room_bytes = room_bytes
        self._memory = memoryview(bytearray(room_bytes))
        #: How many bytes were put and not taken.
        self.size = 0

    @property
    def room(self) -> memoryview:
        """The free memory behind them. After writing to its start, call ``filled``."""
        return self._memory[self.size :]

    def filled(self, count: int) -> None:
        """This many bytes were written to the free memory."""
        self.size += count

    def put(self, data: Buffer) -> None:
        """Append bytes of any size."""
        end = self.size + len(data)
        if end > len(self._memory):
            larger = memoryview(bytearray(end))
            larger[: self.size] = self._memory[: self.size]
            self._memory = larger
        self._memory[self.size : end] = data
        self.size = end

    def clear(self) -> None:
        """Drop what was put."""
        self.size = 0

    def take(self) -> bytes | memoryview:
        """Return everything that was put. A view is overwritten by the next ``put``, unless ``let_go`` is called
        before."""
        taken = self._memory[: self.size]
        self.size = 0
        if len(self._memory) > self._room_bytes:
            self.let_go()
        return bytes(taken) if len(taken) <= COPIED_BYTES else taken

    def let_go(self) -> None:
        """The taken bytes are still in use: allocate other memory for what comes next."""
        assert not self.size, "bytes were put after the last take"
        self._memory = memoryview(bytearray(self._room_bytes))
