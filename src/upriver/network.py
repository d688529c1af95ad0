"""Connections that stay on the machine: nobody else hears them, and they are not paced.

Some systems pace what TCP sends (congestion control ``bbr``), to spare the queues of a network. Over loopback there are
none: a timer for each few segments only lets both sides fall asleep, and a stream of changes loses a quarter of its
speed.
"""

import contextlib
import ipaddress
import socket
from typing import Final

#: Every kernel has it, everybody may ask for it, and where nothing is lost it never waits.
_UNPACED: Final = b"reno"


def is_loopback(host: str) -> bool:
    """Does what goes to this address stay on the machine?"""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def do_not_pace(connected: socket.socket) -> None:
    """Let a connected socket send as fast as it can if its peer is on the same machine."""
    if not hasattr(socket, "TCP_CONGESTION"):
        return
    # Whatever goes wrong, the connection works as well as before; who is gone already is found out elsewhere.
    with contextlib.suppress(OSError):
        if connected.family in (socket.AF_INET, socket.AF_INET6) and is_loopback(connected.getpeername()[0]):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _UNPACED)
