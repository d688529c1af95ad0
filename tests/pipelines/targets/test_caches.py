"""Caches: Debian's servers, and servers that are wrong or away."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import bmemcached
import pytest
import redis

from tests.support.cache_servers import CacheClient, CacheServer, free_port
from upriver.errors import ConnectionLost, OptionError, TargetRefused, Unreachable
from upriver.pipelines.targets.caches import Fresh, Memcached, Redis, cache_at


@pytest.fixture(params=["memcached", "redis-server"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CacheServer]:
    server = CacheServer(request.param, tmp_path)
    yield server
    server.stop()


@pytest.fixture
def user(server: CacheServer) -> Iterator[CacheClient]:
    user = CacheClient(server)
    yield user
    user.close()


@pytest.mark.interop
def test_keys_are_forgotten_and_refreshed(server: CacheServer, user: CacheClient) -> None:
    cache = cache_at(server.url)
    for key in ("a", "b", "c", "old"):
        user.set(key, b"1")
    cache.forget([b"a", b"never", b"x" * 300])
    soon = int(time.time()) + 3600
    cache.refresh([Fresh(b"b", b"2", 0, soon), Fresh(b"not there", b"2"), Fresh(b"old", b"2", 0, 5)])
    assert [user.get(key) for key in ("a", "b", "c", "not there", "old")] == [None, b"2", b"1", None, None]
    cache.close()


@pytest.mark.interop
def test_thousands_of_keys_at_once(server: CacheServer, user: CacheClient) -> None:
    cache = cache_at(server.url)
    user.set("k2499", b"1")
    cache.forget([b"k%d" % n for n in range(2500)])
    assert user.get("k2499") is None
    user.set("k2499", b"1")
    cache.refresh([Fresh(b"k%d" % n, b"new") for n in range(2500)])
    assert user.get("k2499") == b"new"
    cache.close()


@pytest.mark.interop
def test_a_server_that_comes_back_is_connected_to_again(server: CacheServer) -> None:
    cache = cache_at(server.url)
    cache.forget([b"a"])
    server.stop()
    with pytest.raises((Unreachable, ConnectionLost)):
        cache.forget([b"a"])
    server.start()
    cache.forget([b"a"])
    cache.close()


@pytest.mark.interop
def test_a_value_that_is_too_large_for_memcached_is_forgotten(tmp_path: Path) -> None:
    server = CacheServer("memcached", tmp_path)
    user, cache = CacheClient(server), cache_at(server.url)
    user.set("k", b"old")
    cache.refresh([Fresh(b"k", b"x" * (2 << 20)), Fresh(b"j", b"small")])
    assert user.get("k") is None
    user.close()
    cache.close()
    server.stop()


@pytest.mark.interop
@pytest.mark.parametrize(
    ("program", "full"),
    [("memcached", ("-m", "2", "-M")), ("redis-server", ("--maxmemory", "2mb", "--maxmemory-policy", "noeviction"))],
)
def test_a_value_for_which_a_cache_has_no_memory_is_forgotten(
    program: str, full: tuple[str, ...], tmp_path: Path
) -> None:
    server = CacheServer(program, tmp_path, *full)
    user, cache = CacheClient(server), cache_at(server.url)
    user.set("k", b"old")
    stored, n = True, 0
    while stored and n < 20_000:
        n += 1
        try:
            stored = bool(user.client.set(f"filler{n}", os.urandom(700)))
        except (redis.exceptions.OutOfMemoryError, bmemcached.exceptions.MemcachedException):
            stored = False
    assert not stored
    cache.refresh([Fresh(b"k", os.urandom(700)), Fresh(b"not there", b"y")])
    assert user.get("k") is None
    user.close()
    cache.close()
    server.stop()


@pytest.mark.interop
def test_what_redis_refuses_is_told(tmp_path: Path) -> None:
    server = CacheServer("redis-server", tmp_path)
    cache = cache_at(f"redis://127.0.0.1:{server.port}/99")
    with pytest.raises(TargetRefused, match=r"redis://127.0.0.1:\d+/99: 1 refused: .*out of range"):
        cache.forget([b"a"])
    cache.close()
    server.stop()


def test_somebody_else_at_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(100)
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        cache = Memcached("127.0.0.1", listener.getsockname()[1])
        with pytest.raises(ConnectionLost, match="not memcached's binary protocol"):
            cache.forget([b"a"])
        thread.join()


def test_urls() -> None:
    assert isinstance(cache_at("memcached://a"), Memcached)
    assert cache_at("redis://:secret@a:1/2").shown == "redis://a:1/2"
    assert isinstance(cache_at("redis://a"), Redis)
    for wrong in ("a:1", "memcached://a/b", "http://a", "memcached://"):
        with pytest.raises(OptionError, match="memcached://HOST:PORT"):
            cache_at(wrong)
    with pytest.raises(Unreachable):
        Memcached("127.0.0.1", free_port()).forget([b"a"])
