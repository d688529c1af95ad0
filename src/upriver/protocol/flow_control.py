"""Flow control: how much a producer may have on its way, and when a consumer says that it has coped.

Whole packets count. A producer may send while anything is left of the window, so the last packet may exceed it; an
acknowledgement of more than is on its way is worth just that.
"""

from typing import Final

#: A consumer acknowledges when so much of its window is used up.
ACK_SHARE: Final = 0.2


class SendWindow:
    """The producer's side. A size of 0 means: no limit."""

    __slots__ = ("acked_bytes_total", "size_bytes", "unacked_bytes")

    def __init__(self) -> None:
        self.size_bytes = 0
        self.unacked_bytes = 0
        self.acked_bytes_total = 0

    @property
    def room_bytes(self) -> int | None:
        """How many bytes may be sent now; None for as many as you like."""
        return max(0, self.size_bytes - self.unacked_bytes) if self.size_bytes else None

    def resize(self, size_bytes: int) -> None:
        """Another size. Without a limit nothing is on its way that counts, also if there is one again later."""
        self.size_bytes = size_bytes
        if not size_bytes:
            self.unacked_bytes = 0

    def sent(self, size_bytes: int) -> None:
        if self.size_bytes:
            self.unacked_bytes += size_bytes

    def acked(self, size_bytes: int) -> None:
        counted = min(size_bytes, self.unacked_bytes)
        self.unacked_bytes -= counted
        self.acked_bytes_total += counted


class ReceiveWindow:
    """The consumer's side."""

    __slots__ = ("_pending_bytes", "acked_bytes_total", "size_bytes")

    def __init__(self, size_bytes: int = 0) -> None:
        self.size_bytes = size_bytes
        self.acked_bytes_total = 0
        self._pending_bytes = 0

    @property
    def unacked_bytes(self) -> int:
        """How many bytes were processed and not acknowledged yet."""
        return self._pending_bytes

    def processed(self, size_bytes: int) -> int:
        """Count processed bytes; how many to acknowledge now, 0 for none yet."""
        if not self.size_bytes:
            return 0
        self._pending_bytes += size_bytes
        if self._pending_bytes < self.size_bytes * ACK_SHARE:
            return 0
        return self.flush()

    def flush(self) -> int:
        """Acknowledge all that was processed, for instance because the stream has gone quiet."""
        due, self._pending_bytes = self._pending_bytes, 0
        self.acked_bytes_total += due
        return due
