"""The delay after failed logins."""

import ipaddress
from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True)
class _Failures:
    level: float  #: failures that still count
    last: float  #: the time of the last failure
    until: float  #: the time of the next attempt


class LoginThrottle:
    """The delay before a peer's next login, which doubles with each failure.

    One failure expires every ``forget_s``. A success removes one failure and the delay, not all failures: otherwise
    the owner of one account could log in between guesses at another. IPv6 peers count by their /64, the smallest
    network that a site gets. At most ``peers_max`` are kept; the one whose failure is oldest is dropped first.
    """

    def __init__(
        self, *, first_s: float = 0.25, longest_s: float = 30.0, forget_s: float = 60.0, peers_max: int = 10_000
    ) -> None:
        self.first_s = first_s
        self.longest_s = longest_s
        self.forget_s = forget_s
        self.peers_max = peers_max
        self._level_max = 1.0
        while first_s * 2 ** (self._level_max - 1) < longest_s:
            self._level_max += 1
        #: In the order of their last failures.
        self._peers: OrderedDict[str, _Failures] = OrderedDict()

    def delay_s(self, peer: str, now: float) -> float:
        """The time from now until the peer's next login may run."""
        failures = self._peers.get(network_of(peer))
        return 0.0 if failures is None else max(0.0, min(failures.until - now, self.longest_s))

    def failed(self, peer: str, now: float) -> None:
        network = network_of(peer)
        level = min(self._level_now(self._peers.pop(network, None), now) + 1, self._level_max)
        wait_s = min(self.first_s * 2 ** (level - 1), self.longest_s)
        self._peers[network] = _Failures(level, now, now + wait_s)
        self._forget(now)

    def succeeded(self, peer: str) -> None:
        network = network_of(peer)
        failures = self._peers.get(network)
        if failures is None:
            return
        failures.level -= 1
        failures.until = failures.last
        if failures.level <= 0:
            del self._peers[network]

    def __len__(self) -> int:
        """The number of peers with failures."""
        return len(self._peers)

    def _level_now(self, failures: _Failures | None, now: float) -> float:
        if failures is None:
            return 0.0
        return max(0.0, failures.level - max(0.0, now - failures.last) / self.forget_s)

    def _forget(self, now: float) -> None:
        while self._peers:
            oldest = next(iter(self._peers))
            if len(self._peers) <= self.peers_max and self._level_now(self._peers[oldest], now) > 0:
                return
            del self._peers[oldest]


def network_of(peer: str) -> str:
    """The network that counts as one peer: an IPv4 address, or the /64 of an IPv6 address."""
    try:
        address = ipaddress.ip_address(peer.strip("[]"))
    except ValueError:
        return peer
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address), 64), strict=False))
