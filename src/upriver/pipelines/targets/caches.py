"""Caches: memcached over its binary protocol, and Redis through its client.

Keys are deleted or get new values. Only keys that the cache holds already are refreshed, so that its users decide what
it caches. All requests can be repeated.
"""

import contextlib
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from upriver.errors import ConnectionLost, OptionError, TargetRefused, Unreachable
from upriver.wire.dialects.memcached import DeleteQ, Noop, ReplaceQ

TIMEOUT_S: Final = 10.0
#: Number of requests in flight.
SLICE: Final = 1000
#: The longest key of memcached.
KEY_BYTES_MAX: Final = 250
_HEADER: Final = struct.Struct(">BBHBBHIIQ")
_NOOP: Final = 0x0A
#: The key is not in the cache: nothing to do.
_NOT_THERE: Final = (0x01, 0x05)
#: The value is too large or the cache is full: the old value must be deleted.
_NO_ROOM: Final = (0x03, 0x82)
#: From here on, memcached takes an expiry for a Unix time, not for seconds from now.
_ABSOLUTE_S: Final = 60 * 60 * 24 * 30


class Fresh(NamedTuple):
    """The new value of a key."""

    key: bytes
    value: bytes
    flags: int = 0
    expiry: int = 0


class Cache(ABC):
    """One cache; it connects on first use."""

    #: The address without secrets.
    shown: str

    @abstractmethod
    def forget(self, keys: Sequence[bytes]) -> None:
        """Delete these keys."""

    @abstractmethod
    def refresh(self, items: Sequence[Fresh]) -> None:
        """Replace the values of keys that the cache holds."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""


class Memcached(Cache):
    """A memcached server."""

    def __init__(self, host: str, port: int) -> None:
        self.shown = f"memcached://{host}:{port}"
        self._place = (host, port)
        self._socket: socket.socket | None = None

    def forget(self, keys: Sequence[bytes]) -> None:
        """Delete these keys."""
        possible = [key for key in keys if len(key) <= KEY_BYTES_MAX]
        self._send([DeleteQ(key=key, opaque=n).encode() for n, key in enumerate(possible)], possible)

    def refresh(self, items: Sequence[Fresh]) -> None:
        """Replace the values of keys that the cache holds; delete keys whose values do not fit."""
        now = time.time()
        possible = [item for item in items if len(item.key) <= KEY_BYTES_MAX]
        requests = []
        for n, (key, value, flags, expiry) in enumerate(possible):
            # A Unix time in the first month of the epoch would mean seconds from now.
            if expiry and expiry <= max(now, _ABSOLUTE_S):
                requests.append(DeleteQ(key=key, opaque=n).encode())
            else:
                requests.append(ReplaceQ(key=key, value=value, flags=flags, expiration=expiry, opaque=n).encode())
        keys = [item.key for item in possible]
        no_room = self._send(requests, keys)
        if no_room:
            self.forget(no_room)

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, requests: Sequence[bytes], keys: Sequence[bytes]) -> list[bytes]:
        """Send all requests; returns the keys whose values did not fit."""
        no_room: list[bytes] = []
        try:
            for at in range(0, len(requests), SLICE):
                self._connected().sendall(b"".join([*requests[at : at + SLICE], Noop().encode()]))
                for opaque, status, text in self._refused():
                    if status in _NO_ROOM:
                        no_room.append(keys[opaque])
                    elif status not in _NOT_THERE:
                        raise TargetRefused(self.shown, 1, [f"{keys[opaque]!r}: {text or hex(status)}"])
        except OSError as error:
            self.close()
            raise ConnectionLost(self.shown, str(error)) from None
        except BaseException:
            self.close()  # responses may still arrive
            raise
        return no_room

    def _connected(self) -> socket.socket:
        if self._socket is None:
            try:
                self._socket = socket.create_connection(self._place, TIMEOUT_S)
            except OSError as error:
                raise Unreachable(self.shown, str(error)) from None
        return self._socket

    def _refused(self) -> Iterator[tuple[int, int, str]]:
        """Opaque, status and text of the refused requests, up to the response that ends the slice."""
        while True:
            magic, opcode, _, _, _, status, length, opaque, _ = _HEADER.unpack(self._exactly(_HEADER.size))
            if magic != 0x81 or length > 1 << 20:
                raise ConnectionLost(self.shown, "invalid response: not memcached's binary protocol")
            body = self._exactly(length)
            if opcode == _NOOP:
                return
            if status:
                yield opaque, status, body.decode(errors="replace")

    def _exactly(self, size: int) -> bytes:
        assert self._socket is not None
        data = bytearray()
        while len(data) < size:
            piece = self._socket.recv(size - len(data))
            if not piece:
                raise ConnectionLost(self.shown, "it closed the connection")
            data += piece
        return bytes(data)


class Redis(Cache):
    """A Redis server, or a compatible one."""

    def __init__(self, url: str) -> None:
        import redis  # here: only this cache needs it

        parts = urlsplit(url)
        self.shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        self._redis: Any = redis.Redis.from_url(
            url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, health_check_interval=30
        )
        self._errors: Any = redis.exceptions

    def forget(self, keys: Sequence[bytes]) -> None:
        """Delete these keys."""
        with self._told():
            for at in range(0, len(keys), SLICE):
                self._redis.delete(*keys[at : at + SLICE])

    def refresh(self, items: Sequence[Fresh]) -> None:
        """Replace the values of keys that the cache holds; delete keys whose values do not fit."""
        now = time.time()
        with self._told():
            for at in range(0, len(items), SLICE):
                part = items[at : at + SLICE]
                pipeline = self._redis.pipeline(transaction=False)
                for key, value, _, expiry in part:
                    if expiry and expiry <= now:
                        pipeline.delete(key)
                    else:
                        pipeline.set(key, value, xx=True, exat=expiry or None)
                self._drop_refused(part, pipeline.execute(raise_on_error=False))

    def _drop_refused(self, items: Sequence[Fresh], answers: Sequence[Any]) -> None:
        """Delete keys; this works even when the cache is full."""
        refused = [(item.key, answer) for item, answer in zip(items, answers, strict=True) if _is_error(answer)]
        for _, error in refused:
            if not isinstance(error, self._errors.OutOfMemoryError):
                raise error
        self.forget([key for key, _ in refused])

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Turn errors of Redis into ours: down and busy are temporary, the others are not."""
        try:
            yield
        except (self._errors.ConnectionError, self._errors.TimeoutError) as error:
            raise Unreachable(self.shown, str(error)) from None
        except self._errors.RedisError as error:
            raise TargetRefused(self.shown, 1, [str(error)]) from None


def _is_error(answer: Any) -> bool:
    return isinstance(answer, Exception)


def cache_at(url: str) -> Cache:
    """The cache of a URL."""
    parts = urlsplit(url)
    if parts.scheme == "memcached" and parts.hostname and not parts.path.strip("/"):
        return Memcached(parts.hostname, parts.port or 11211)
    if parts.scheme in ("redis", "rediss", "unix"):
        try:
            return Redis(url)
        except ImportError:
            raise OptionError("to", url, 'redis is missing: pip install "upriver[pipelines]"') from None
    raise OptionError("to", url, "it must be memcached://HOST:PORT or redis://HOST:PORT/0, several with commas")
