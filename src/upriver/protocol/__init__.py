"""Connections without I/O: the rules of both sides of a stream.

Messages and the time go in, messages come out. There is no socket, clock or thread here, so the same code runs in a
node, in a client and in a simulation of a whole cluster.
"""

from upriver.protocol.connection_names import NAME_BYTES_MAX, checked_name, made_up, successor_by_open, successor_by_tap
from upriver.protocol.liveness import SilenceWatch

__all__ = [
    "NAME_BYTES_MAX",
    "SilenceWatch",
    "checked_name",
    "made_up",
    "successor_by_open",
    "successor_by_tap",
]
