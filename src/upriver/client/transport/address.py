"""Parses the address of a cluster: ``HOST:PORT``, several of them, or a URL.

::

    127.0.0.1:11210
    a.example:11210,b.example,[::1]:11211
    upriver://user:password@a.example,b.example:11210/bucket?tls=on&ca=/etc/ca.pem&keepalive_s=30

Several hosts belong to one cluster: the client takes the cluster map from the first that answers. In a URL, user,
password and bucket may contain ``%`` escapes.
"""

import dataclasses
import math
import re
from typing import Final
from urllib.parse import parse_qsl, quote, unquote, urlencode

from upriver.errors import AddressError, without_password
from upriver.network import KEEPALIVE_S, is_loopback

PORT: Final = 11210
SCHEME: Final = "upriver"
BUCKET: Final = "default"
_FORM: Final = f"use HOST:PORT or {SCHEME}://user:password@host:port/bucket"
_SWITCH: Final = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}
_HOST: Final = re.compile(
    r"\[(?P<v6>[:.%\w]+)\](?::(?P<v6port>[^:]*))?|(?P<host>[^\[\]:/?#@\s]+)(?::(?P<port>[^:]*))?",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Endpoint:
    """A host and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether traffic to it stays on this machine."""
        return is_loopback(self.host)


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """The nodes of a cluster, the login and the bucket."""

    endpoints: tuple[Endpoint, ...]
    user: str | None = None
    password: str | None = dataclasses.field(default=None, repr=False)
    #: None for the bucket that the node serves.
    bucket: str | None = None
    tls: bool = False
    #: File with trusted certificates; None for those of the system.
    ca: str | None = None
    #: An idle node that answers no TCP keepalive for about this many seconds is lost; 0 for never.
    keepalive_s: float = KEEPALIVE_S

    def __str__(self) -> str:
        """The address without the password."""
        hosts = ",".join(map(str, self.endpoints))
        user = "" if self.user is None else f"{self.user}@"
        bucket = "" if self.bucket is None else f"/{self.bucket}"
        return f"{SCHEME}://{user}{hosts}{bucket}" if user or bucket or self.tls else hosts

    def as_text(self) -> str:
        """The address with everything that ``parse`` reads, the password too: for programs, not for people."""
        hosts = ",".join(map(str, self.endpoints))
        if self == Address(self.endpoints):
            return hosts
        user = "" if self.user is None else quote(self.user, "")
        password = "" if self.password is None else f":{quote(self.password, '')}"
        settings = {"tls": "on" if self.tls else "off", **({} if self.ca is None else {"ca": self.ca})}
        login = "" if self.user is None else f"{user}{password}@"
        return f"{SCHEME}://{login}{hosts}/{quote(self.bucket or '', '')}?{urlencode(settings)}"

    @classmethod
    def parse(cls, text: "str | Address") -> "Address":
        """Parse an address; raise ``AddressError`` if it is invalid."""
        if isinstance(text, Address):
            return text
        if "://" not in text:
            return cls(_endpoints(text, text))
        return _parse_url(text)

    def with_login(self, user: str, password: str) -> "Address":
        """Return the same address with another login."""
        return dataclasses.replace(self, user=user, password=password)


def _parse_url(text: str) -> Address:
    shown = without_password(text)
    scheme, _, rest = text.partition("://")
    if scheme.lower() != SCHEME:
        raise AddressError(shown, f"unknown scheme {scheme!r}; use {SCHEME}://")
    rest, _, query = rest.partition("?")
    place, _, bucket = rest.partition("/")
    login, at, hosts = place.rpartition("@")
    user, colon, password = login.partition(":")
    if at and not user:
        raise AddressError(shown, "the user before the @ is missing")
    settings = _query(query, shown)
    return Address(
        _endpoints(hosts, shown),
        user=unquote(user) if at else None,
        password=unquote(password) if colon else None,
        bucket=unquote(bucket) or None,
        tls=_switch(settings.get("tls", "on" if "ca" in settings else "off"), shown),
        ca=settings.get("ca"),
        keepalive_s=_seconds(settings["keepalive_s"], shown) if "keepalive_s" in settings else KEEPALIVE_S,
    )


def _query(query: str, shown: str) -> dict[str, str]:
    settings = dict(parse_qsl(query, keep_blank_values=True))
    unknown = settings.keys() - {"tls", "ca", "keepalive_s"}
    if unknown:
        raise AddressError(shown, f"unknown setting {', '.join(sorted(unknown))}; use tls, ca or keepalive_s")
    return settings


def _seconds(value: str, shown: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise AddressError(shown, f"keepalive_s must be a number of seconds, 0 or more, not {value!r}")
    return seconds


def _switch(value: str, shown: str) -> bool:
    if value.lower() not in _SWITCH:
        raise AddressError(shown, f"tls must be on or off, not {value!r}")
    return _SWITCH[value.lower()]


def _endpoints(hosts: str, shown: str) -> tuple[Endpoint, ...]:
    return tuple(_endpoint(part.strip(), shown) for part in hosts.split(","))


def _endpoint(text: str, shown: str) -> Endpoint:
    if not text:
        raise AddressError(shown, f"a host is missing; {_FORM}")
    found = _HOST.fullmatch(text)
    if found is None:
        hint = "put an IPv6 address in brackets" if text.count(":") > 1 else _FORM
        raise AddressError(shown, f"invalid host and port {text!r}; {hint}")
    host, port = found["v6"] or found["host"], found["v6port"] or found["port"]
    if host.isdigit():  # the system would read an IPv4 address; the user probably means a port or a vbucket
        raise AddressError(shown, f"{host!r} is a number, not a host; {_FORM}")
    if port is None and not text.endswith(":"):
        return Endpoint(host, PORT)
    if not port or not port.isascii() or not port.isdigit() or not 1 <= int(port[:6]) <= 65535:
        raise AddressError(shown, f"invalid port in {text!r}; use a number from 1 to 65535")
    return Endpoint(host, int(port))
