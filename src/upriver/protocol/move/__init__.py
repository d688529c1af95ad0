"""The mover: the steps that move or replicate vbuckets between two nodes, and the relay between their connections."""

from upriver.protocol.move.mover import (
    Action,
    Announce,
    Connect,
    Disconnect,
    Goal,
    Link,
    Move,
    MoverSteps,
    Phase,
    Rest,
    Send,
    moved_map,
)

__all__ = [
    "Action",
    "Announce",
    "Connect",
    "Disconnect",
    "Goal",
    "Link",
    "Move",
    "MoverSteps",
    "Phase",
    "Rest",
    "Send",
    "moved_map",
]
