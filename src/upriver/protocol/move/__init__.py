"""The mover: the steps that move or replicate vbuckets between two nodes, and the relay between their connections."""

from upriver.protocol.move.mover import Goal, Link, Move, Phase, moved_map

__all__ = [
    "Goal",
    "Link",
    "Move",
    "Phase",
    "moved_map",
]
