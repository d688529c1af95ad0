"""Settings of sockets: keepalive everywhere, and no pacing over loopback.

A peer whose machine or network vanished sends nothing, and no end of the connection either. With TCP keepalive the
system probes an idle peer and reports the connection as lost. Dialects without noops have no other means.

Some systems pace TCP (congestion control ``bbr``) to protect the queues of a network. Loopback has no such queues:
there the timers only make both sides sleep, and a change stream loses a quarter of its speed.
"""

import contextlib
import ipaddress
import socket
from typing import Final

#: Available on every kernel without privileges; without packet loss it never waits.
_UNPACED: Final = b"reno"
#: An idle peer that answers no probe for about this long is lost.
KEEPALIVE_S: Final = 60.0
#: The number of unanswered probes after which a peer is lost.
_PROBES: Final = 3


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


def keep_alive(connected: socket.socket, keepalive_s: float) -> None:
    """Let the system find out within about this many seconds that an idle peer has vanished; 0 for never.

    Half of the time passes before the first probe. The system counts in seconds, so that the shortest time is 4 s.
    """
    if connected.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with contextlib.suppress(OSError):  # a peer that has disconnected already is noticed elsewhere
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, int(keepalive_s > 0))
        if keepalive_s > 0:
            seconds = {
                "TCP_KEEPIDLE": keepalive_s / 2,
                "TCP_KEEPINTVL": keepalive_s / (2 * _PROBES),
                "TCP_KEEPCNT": _PROBES,
            }
            for name, value in seconds.items():
                if hasattr(socket, name):  # systems name them differently, or have a fixed time
                    connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), min(max(1, round(value)), 32767))
