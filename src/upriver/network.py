"""Connections over loopback: they stay on the machine, and are not paced.

Some systems pace TCP (congestion control ``bbr``) to protect the queues of a network. Loopback has no such queues:
there the timers only make both sides sleep, and a change stream loses a quarter of its speed.
"""

import contextlib
import ipaddress
import socket
from typing import Final

#: Available on every kernel without privileges; without packet loss it never waits.
_UNPACED: Final = b"reno"


def is_loopback(host: str) -> bool:
    """Whether traffic to this address stays on the machine."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def do_not_pace(connected: socket.socket) -> None:
    """Let a connected socket send as fast as it can if its peer is on the same machine."""
    if not hasattr(socket, "TCP_CONGESTION"):
        return
    # This is only an optimisation, and a peer that has disconnected is noticed elsewhere.
    with contextlib.suppress(OSError):
        if connected.family in (socket.AF_INET, socket.AF_INET6) and is_loopback(connected.getpeername()[0]):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _UNPACED)
