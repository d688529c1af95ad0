"""The tables in which foreign consumers keep what a stream brings, with one of three policies for a rollback.

These are models of foreign consumers, written from docs/semantics.md alone and without the project's own position
arithmetic, so that a mistake there meets an independent opinion.
"""

from collections.abc import Callable
from typing import Final, Literal

from tests.simulation.truth import Contents, Version, Violation
from upriver.model import FailoverLog

Policy = Literal["rewind", "emit", "fail"]
#: `upr` does not tell where a snapshot ends.
UNKNOWN_END: Final = 2**64 - 1

#: Reads keys from the active copy now: what it holds of them, its high seqno, its newest uuid. None if there is none.
Reader = Callable[[list[bytes]], tuple[Contents, int, int] | None]


class Holder:
    """One vbucket of a foreign consumer, without history."""

    def __init__(self, policy: Policy, read_active: Reader) -> None:
        self.policy = policy
        self.read_active = read_active
        self.log: FailoverLog | None = None
        self.held: Contents = {}
        self.seqno = self.start = self.end = 0
        #: The first consistent seqno since the start at 0.
        self.filled: int | None = None
        #: It stopped at a rollback, as it was told to, and waits for its operator.
        self.failed = False
        self.rollbacks = 0
        #: Keys that a repair has read, and until when they must be read again.
        self.doubt: set[bytes] = set()
        self._doubt_to = self._doubt_uuid = 0
        self._keys: set[bytes] = set()
        self._first_marker = True
        self._bounded = True

    # Its position.

    @property
    def consistent_seqno(self) -> int:
        """The last seqno at which it held a state that the producer once had."""
        return self.seqno if self.seqno in (self.start, self.end) else self.start

    @property
    def ready(self) -> bool:
        """It can take a stream."""
        return not self.failed

    @property
    def certain(self) -> bool:
        """It claims to hold exactly the state at ``seqno``."""
        return self.consistent_seqno == self.seqno and not self.doubt and self.log is not None and not self.failed

    def _place(self, seqno: int) -> None:
        self.seqno = self.start = self.end = seqno

    # What the producer says.

    def accept(self, log: FailoverLog) -> bool:
        """The stream goes on from here under this log; False if a repair must be done again and cannot."""
        if self.doubt and log.newest.vbucket_uuid != self._doubt_uuid and not self._read_again(self.doubt):
            return False
        self.log = log
        self._first_marker = True
        return True

    def marker(self, start: int | None, end: int | None) -> None:
        """A snapshot begins; `upr` gives no bounds."""
        self._keys.clear()
        consistent, first = self.consistent_seqno, self._first_marker
        self._first_marker = False
        self._bounded = start is not None
        if start is None or end is None:
            # Everything before it was consistent, unless the stream was resumed inside a snapshot.
            if not (first and consistent < self.seqno):
                consistent = self.seqno
                self._complete()
            self.start, self.end = consistent, UNKNOWN_END
            return
        expected = consistent if first else self.seqno
        if start != expected:
            raise Violation(f"a snapshot begins at {start}, but {expected} was the last consistent state")
        if end <= start:
            raise Violation(f"a snapshot from {start} to {end} is empty")
        if consistent < self.seqno:
            end = max(end, self.end)
        self.start, self.end = min(start, consistent), end

    def snapshot_end(self) -> None:
        """The drafts say that all of it was sent; on `upr` only the next marker does. Where it ends is not said."""
        self._place(self.seqno)
        self._complete()

    def change(self, found: Version, *, every_version: bool = False) -> None:
        """A change of a key."""
        if found.key in self._keys and not every_version:
            raise Violation(f"{found} comes a second time in a snapshot")
        self._keys.add(found.key)
        self._advance(found.seqno)
        self.held[found.key] = found
        self._check_complete()

    def advanced(self, seqno: int) -> None:
        """Nothing more passes the filter up to here."""
        self._advance(seqno)
        self._check_complete()

    def _advance(self, seqno: int) -> None:
        if not self.seqno < seqno <= self.end:
            raise Violation(f"change {seqno} comes after {self.seqno} in a snapshot that ends at {self.end}")
        self.seqno = seqno

    def ended_ok(self, end: int) -> None:
        """On `upr` only this proves the last snapshot complete, and that nothing passed a filter up to the end."""
        if not self._bounded:
            self._place(max(self.seqno, end))
            self._complete()

    def _check_complete(self) -> None:
        if self.seqno == self.end:
            self._complete()

    def _complete(self) -> None:
        if self.filled is None and self.seqno:
            self.filled = self.seqno
        if (
            self.doubt
            and self.seqno >= self._doubt_to
            and self.log
            and self.log.newest.vbucket_uuid == self._doubt_uuid
        ):
            self.doubt.clear()

    # Going back.

    def clear(self) -> None:
        """Start over: what does not come again is gone."""
        self.held, self.doubt, self.filled = {}, set(), None
        self._place(0)

    def roll_back(self, seqno: int) -> bool:
        """Undo what lies above ``seqno``, by the policy; False if that cannot be done now."""
        self.rollbacks += 1
        if self.policy == "fail":
            self.failed = True
            return True
        if self.filled is None or seqno < self.filled or self.policy == "rewind":
            self.clear()
            return True
        above = {key for key, found in self.held.items() if found.seqno > seqno}
        if not self._read_again(above | self.doubt):
            return False
        self._place(seqno)
        return True

    def _read_again(self, keys: set[bytes]) -> bool:
        answer = self.read_active(sorted(keys))
        if answer is None:
            return False
        found, self._doubt_to, self._doubt_uuid = answer
        for key in keys:
            self.held.pop(key, None)
        self.held.update(found)
        self.doubt = set(keys)
        return True

    def reset_by_operator(self) -> None:
        """After a failure somebody decides to start over."""
        self.failed = False
        self.clear()
