"""Tells connections which vbuckets changed role: all of them together, in the event loop's next turn."""

from collections.abc import Callable
from typing import Final

from upriver.node.state import NodeState


class RoleChanges:
    """Gathers role changes, from any thread, until the event loop's next turn."""

    def __init__(self, node: NodeState, tell: Callable[[set[int]], object]) -> None:
        self._node: Final = node
        self._tell: Final = tell
        self._numbers: set[int] = set()
        node.bucket.role_listeners.append(self._taken)

    def _taken(self, number: int) -> None:
        if not self._numbers:
            self._node.scheduler.from_thread(self._pass_on)
        self._numbers.add(number)

    def _pass_on(self) -> None:
        numbers, self._numbers = self._numbers, set()
        self._tell(numbers)
