"""Debian's memcached and redis-server, each a process of a test's own on the loopback interface."""

import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import bmemcached
import pytest
import redis

PATIENCE_S = 60.0


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class CacheServer:
    """A server that can be stopped and started again at the same port."""

    def __init__(self, program: str, directory: Path, *options: str) -> None:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
        self.port = free_port()
        port = str(self.port)
        self.command = {
            "memcached": ["memcached", "-u", "root", "-l", "127.0.0.1", "-p", port, "-U", "0", "-I", "1m"],
            "redis-server": [
                "redis-server",
                "--bind",
                "127.0.0.1",
                "--port",
                port,
                "--save",
                "",
                "--dir",
                str(directory),
            ],
        }[program]
        self.command += options
        self.url = f"memcached://127.0.0.1:{port}" if program == "memcached" else f"redis://127.0.0.1:{port}/0"
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert self.process.poll() is None, f"{self.command[0]} did not start"
                assert time.monotonic() < deadline
                time.sleep(0.02)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


class CacheClient:
    """An application's client of the cache, from another library."""

    def __init__(self, server: CacheServer) -> None:
        self.is_redis = server.url.startswith("redis")
        place = f"127.0.0.1:{server.port}"
        self.client: Any = redis.Redis(port=server.port) if self.is_redis else bmemcached.Client((place,))

    def get(self, key: str) -> bytes | None:
        found = self.client.get(key)
        return found if found is None or isinstance(found, bytes) else bytes(str(found), "utf-8")

    def set(self, key: str, value: bytes) -> None:
        self.client.set(key, value)

    def close(self) -> None:
        self.client.close() if self.is_redis else self.client.disconnect_all()
