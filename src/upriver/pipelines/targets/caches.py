"""Second-layer caches: memcached by its binary protocol, Redis by its own client.

A cache is told which keys to forget and which to hold with another value; only what it holds already is refreshed, so
that it stays the cache that its users made of it. Everything may be said twice.
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
#: So many requests are on their way at once.
SLICE: Final = 1000
#: Longer keys cannot be in memcached.
KEY_BYTES_MAX: Final = 250
_HEADER: Final = struct.Struct(">BBHBBHIIQ")
_NOOP: Final = 0x0A
#: What says that a key is not there, or not in this cache: nothing has to be done.
_NOT_THERE: Final = (0x01, 0x05)
#: A value that is too large, or for which the cache has no memory, must not be left there in its older version.
_NO_ROOM: Final = (0x03, 0x82)
#: From here on memcached takes a number for a time, not for seconds from now.
_ABSOLUTE_S: Final = 60 * 60 * 24 * 30


class Fresh(NamedTuple):
    """What a key holds now."""

    key: bytes
    value: bytes
    flags: int = 0
    expiry: int = 0


class Cache(ABC):
    """One cache; it connects when it is needed."""

    #: Where it is, without secrets.
    shown: str

    @abstractmethod
    def forget(self, keys: Sequence[bytes]) -> None:
        """Delete these keys."""

    @abstractmethod
    def refresh(self, items: Sequence[Fresh]) -> None:
        """Give the keys that are there these values."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the connection."""


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
        """Replace the values that are there; what there is no room for goes."""
        now = time.time()
        possible = [item for item in items if len(item.key) <= KEY_BYTES_MAX]
        requests = []
        for n, (key, value, flags, expiry) in enumerate(possible):
            # A time in the first month of the epoch would be taken for seconds from now.
            if expiry and expiry <= max(now, _ABSOLUTE_S):
                requests.append(DeleteQ(key=key, opaque=n).encode())
            else:
                requests.append(ReplaceQ(key=key, value=value, flags=flags, expiration=expiry, opaque=n).encode())
        keys = [item.key for item in possible]
        no_room = self._send(requests, keys)
        if no_room:
            self.forget(no_room)

    def close(self) -> None:
        """Let go of the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, requests: Sequence[bytes], keys: Sequence[bytes]) -> list[bytes]:
        """Send everything; the keys for whose values there was no room."""
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
            self.close()  # answers may still be on their way
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
        """Opaque, status and text of what was not done, up to the answer that ends the slice."""
        while True:
            magic, opcode, _, _, _, status, length, opaque, _ = _HEADER.unpack(self._exactly(_HEADER.size))
            if magic != 0x81 or length > 1 << 20:
                raise ConnectionLost(self.shown, "this is no answer of memcached's binary protocol")
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
    """A Redis server, or one that speaks as it does."""

    def __init__(self, url: str) -> None:
        import redis  # here, because only this cache needs it

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
        """Replace the values that are there; what there is no room for goes."""
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
        """Deleting is possible also where nothing more can be stored."""
        refused = [(item.key, answer) for item, answer in zip(items, answers, strict=True) if _is_error(answer)]
        for _, error in refused:
            if not isinstance(error, self._errors.OutOfMemoryError):
                raise error
        self.forget([key for key, _ in refused])

    def close(self) -> None:
        """Let go of the connections."""
        self._redis.close()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Redis' errors as ours: down and busy come again, the others do not."""
        try:
            yield
        except (self._errors.ConnectionError, self._errors.TimeoutError) as error:
            raise Unreachable(self.shown, str(error)) from None
        except self._errors.RedisError as error:
            raise TargetRefused(self.shown, 1, [str(error)]) from None


def _is_error(answer: Any) -> bool:
    return isinstance(answer, Exception)


def cache_at(url: str) -> Cache:
    """The cache that a URL names."""
    parts = urlsplit(url)
    if parts.scheme == "memcached" and parts.hostname and not parts.path.strip("/"):
        return Memcached(parts.hostname, parts.port or 11211)
    if parts.scheme in ("redis", "rediss", "unix"):
        try:
            return Redis(url)
        except ImportError:
            raise OptionError("to", url, 'redis is missing: pip install "upriver[pipelines]"') from None
    raise OptionError("to", url, "write memcached://HOST:PORT or redis://HOST:PORT/0, several with commas")
