"""Ordinary memcached commands, byte by byte, for tests that need something to stream."""

import struct

from tests.support.raw_client import Packet, RawClient, packet

#: Vbucket states as the memcached commands and TAP number them.
ACTIVE, REPLICA, PENDING, DEAD = 1, 2, 3, 4


class Store(RawClient):
    """A connection for ordinary commands; each must succeed."""

    def __enter__(self) -> "Store":
        return self

    def do(self, request: bytes) -> Packet:
        answer = self.ask(request)
        assert answer.status == 0, answer
        return answer

    def set(self, key: bytes, value: bytes = b"v", vbucket: int = 0, *, flags: int = 0, expiry: int = 0) -> int:
        """Store a value; its CAS."""
        return self.do(packet(0x01, struct.pack(">II", flags, expiry), key, value, vbucket=vbucket)).cas

    def set_with_meta(
        self, key: bytes, value: bytes, vbucket: int = 0, *, expiry: int = 0, revision: int, cas: int
    ) -> None:
        extras = struct.pack(">IIQQI", 0, expiry, revision, cas, 2)  # 2: whatever is stored
        self.do(packet(0xA2, extras, key, value, vbucket=vbucket))

    def delete_with_meta(self, key: bytes, vbucket: int = 0, *, revision: int, cas: int) -> None:
        self.do(packet(0xA8, struct.pack(">IIQQI", 0, 0, revision, cas, 2), key, vbucket=vbucket))

    def delete(self, key: bytes, vbucket: int = 0) -> None:
        self.do(packet(0x04, b"", key, vbucket=vbucket))

    def expire(self, key: bytes, vbucket: int = 0, *, revision: int = 1, cas: int = 1) -> None:
        """Store a key whose time has passed, and let a get notice it: two changes."""
        self.set_with_meta(key, b"v", vbucket, expiry=1, revision=revision, cas=cas)
        assert self.ask(packet(0x00, b"", key, vbucket=vbucket)).status == 1

    def lock(self, key: bytes, seconds: int, vbucket: int = 0) -> None:
        self.do(packet(0x94, struct.pack(">I", seconds), key, vbucket=vbucket))

    def get(self, key: bytes, vbucket: int = 0) -> bytes | None:
        answer = self.ask(packet(0x00, b"", key, vbucket=vbucket))
        return answer.value if answer.status == 0 else None

    def set_state(self, state: int, vbucket: int = 0) -> None:
        self.do(packet(0x3D, struct.pack(">I", state), vbucket=vbucket))

    def state(self, vbucket: int = 0) -> int:
        answer = self.do(packet(0x3E, vbucket=vbucket))
        return int.from_bytes(answer.extras + answer.value, "big")

    def flush(self) -> None:
        self.do(packet(0x08))

    def high_seqno(self, vbucket: int = 0) -> int:
        """From the statistics, as an operator reads it."""
        return int(self.statistics(b"vbucket-seqno %d" % vbucket)[f"vb_{vbucket}:high_seqno"])

    def uuid(self, vbucket: int = 0) -> int:
        return int(self.statistics(b"vbucket-seqno %d" % vbucket)[f"vb_{vbucket}:uuid"])

    def statistics(self, group: bytes) -> dict[str, str]:
        self.send(packet(0x10, b"", group))
        found: dict[str, str] = {}
        while (answer := self.take()).key:
            found[answer.key.decode()] = answer.value.decode()
        return found
