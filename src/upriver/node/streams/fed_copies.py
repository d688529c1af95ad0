"""Which copies are fed from outside: by one stream with seqnos, or by TAP peers, never by both.

TAP gives a copy a history of its own. A stream that feeds the same copy would not notice while its source is idle, and
the copy would miss what the stream has sent; so each side refuses what the other side feeds.
"""

from upriver.errors import KeyExists


class FedCopies:
    """The copies of a node that connections feed."""

    __slots__ = ("_peers", "_streamed")

    def __init__(self) -> None:
        self._streamed: set[int] = set()
        #: The TAP connections that have sent something for each copy, and are open.
        self._peers: dict[int, set[object]] = {}

    def open_stream(self, number: int) -> None:
        """A stream begins to feed a copy."""
        self.check_no_stream(number)
        if self._peers.get(number):
            raise KeyExists("a TAP connection feeds this vbucket", vbucket=number)
        self._streamed.add(number)

    def close_stream(self, number: int) -> None:
        """The stream is over."""
        self._streamed.discard(number)

    def has_stream(self, number: int) -> bool:
        """Whether a stream feeds a copy, or is being asked for."""
        return number in self._streamed

    def check_no_stream(self, number: int) -> None:
        """Refuse a copy that a stream feeds."""
        if number in self._streamed:
            raise KeyExists("another stream feeds this vbucket already", vbucket=number)

    def note_peer(self, number: int, peer: object) -> None:
        """A TAP peer sends something for a copy."""
        self.check_no_stream(number)
        self._peers.setdefault(number, set()).add(peer)

    def end_peers(self, number: int) -> None:
        """The TAP peers of a vbucket have finished: it is active or dead now."""
        self._peers.pop(number, None)

    def forget_peer(self, peer: object) -> None:
        """A TAP connection is closed."""
        for number in [number for number, peers in self._peers.items() if peer in peers]:
            self._peers[number].discard(peer)
            if not self._peers[number]:
                del self._peers[number]
