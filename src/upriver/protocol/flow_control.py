"""Flow control: how many bytes a producer may have in flight, and when a consumer acknowledges them.

Whole packets count. A producer may send while any of the window is left, so the last packet may exceed it. An
acknowledgement of more bytes than are in flight counts as all of them.
"""

from typing import Final

#: A consumer acknowledges when this share of its window is used up.
ACK_SHARE: Final = 0.2


class SendWindow:
    """The producer's side. A size of 0 means no limit."""

    __slots__ = ("acked_bytes_total", "size_bytes", "unacked_bytes")

    def __init__(self) -> None:
        self.size_bytes = 0
        self.unacked_bytes = 0
        self.acked_bytes_total = 0

    @property
    def room_bytes(self) -> int | None:
        """How many bytes may be sent now; None for no limit."""
        return max(0, self.size_bytes - self.unacked_bytes) if self.size_bytes else None

    def resize(self, size_bytes: int) -> None:
        """Change the size. Without a limit nothing counts as in flight, also when a limit is set again later."""
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
        """Count processed bytes; return how many to acknowledge now, 0 for none yet."""
        if not self.size_bytes:
            return 0
        self._pending_bytes += size_bytes
        if self._pending_bytes < self.size_bytes * ACK_SHARE:
            return 0
        return self.flush()

    def flush(self) -> int:
        """Return all processed bytes to acknowledge, for instance because the stream has gone quiet."""
        due, self._pending_bytes = self._pending_bytes, 0
        self.acked_bytes_total += due
        return due
