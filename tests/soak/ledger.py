"""What clients wrote and what was acknowledged: which contents of a key are possible, and which are a loss.

The writes of a key are numbered from 1. Each tenth is a deletion, the others store their number. One client writes a
key, one write after the other. When the outcome of a write is unknown, the client writes that key no more, because the
write may still arrive behind later ones.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

DELETION_EACH = 10


def contents_after(number: int) -> bytes | None:
    """What a key holds after its n-th write; None for nothing."""
    return None if number % DELETION_EACH == 0 else b"%d" % number


def number_in(value: bytes) -> bytes:
    """The number at the start of a stored value; padding follows."""
    return value.partition(b" ")[0]


@dataclass(frozen=True, slots=True)
class Loss:
    """A key that does not hold what it must."""

    key: bytes
    found: bytes | None
    acknowledged: int
    attempted: int

    def __str__(self) -> str:
        held = "nothing" if self.found is None else f"write {self.found.decode()}"
        return f"{self.key.decode()} holds {held}, write {self.acknowledged} was acknowledged, {self.attempted} sent"


@dataclass(slots=True)
class _Writes:
    attempted: int = 0
    acknowledged: int = 0


@dataclass(slots=True)
class Ledger:
    """The writes of all clients."""

    acknowledged: int = 0
    unknown: int = 0
    longest_wait_s: float = 0.0
    #: What was happening during the longest wait.
    longest_wait_during: str = ""
    losses: list[Loss] = field(default_factory=list)
    _keys: dict[bytes, _Writes] = field(default_factory=dict)

    def attempt(self, key: bytes) -> int:
        """The number of the next write of a key, which is about to be sent."""
        writes = self._keys.setdefault(key, _Writes())
        writes.attempted += 1
        return writes.attempted

    def acknowledge(self, key: bytes, number: int, waited_s: float, happened: Callable[[], str] = str) -> None:
        """A write was acknowledged; ``happened`` names what went wrong meanwhile."""
        self._keys[key].acknowledged = number
        self.acknowledged += 1
        if waited_s > self.longest_wait_s:
            self.longest_wait_s, self.longest_wait_during = waited_s, happened()

    def check(self, key: bytes, found: bytes | None) -> None:
        """Compare what a key holds, now that no write of it is under way, with what it may hold."""
        writes = self._keys[key]
        possible = {contents_after(number) for number in range(writes.acknowledged, writes.attempted + 1)}
        if found not in possible:
            self.losses.append(Loss(key, found, writes.acknowledged, writes.attempted))

    def __iter__(self) -> Iterator[bytes]:
        """Every key that was written."""
        return iter(list(self._keys))
