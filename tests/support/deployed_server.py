"""A stand-in for a deployed server: it does what those do differently from a node of ours.

It does not grant our feature, wants a SCRAM login and a bucket, knows only its own settings, begins markers with the
first seqno of a snapshot, sends whole snapshots however early a range ends, and compresses values with Snappy.
"""

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
import scramp

from upriver.wire import AnyResponse, Framer, Request, dcp, memcached, upr
from upriver.wire.codes import Status
from upriver.wire.dialects.memcached import Feature
from upriver.wire.framing import MEMCACHED

GRANTED: Final = frozenset({Feature.XERROR, Feature.SELECT_BUCKET, Feature.SNAPPY, Feature.JSON})
SETTINGS: Final = frozenset({b"enable_noop", b"set_noop_interval", b"connection_buffer_size", b"enable_expiry_opcode"})
PASSWORD: Final = "secret"
UUID: Final = 0xC0FFEE
_SNAPPY: Final = pa.Codec("snappy")
_MECHANISM: Final = scramp.ScramMechanism("SCRAM-SHA-256")
_LOGIN: Final = _MECHANISM.make_auth_info(PASSWORD)


@dataclass
class DeployedServer:
    """Some vbuckets, served to every client that logs in."""

    vbuckets: int = 2
    #: Each connection is cut after this many changes; None for never.
    cut_after: int | None = None
    #: Vbuckets that are refused, with a map that names their owner.
    elsewhere: dict[int, int] = field(default_factory=dict)
    #: Streams say nothing of what was written after they began.
    mute: bool = False
    #: Keys whose values cannot be inflated.
    damaged: set[bytes] = field(default_factory=set)
    #: The settings that it was asked for and does not know, and the features that it did not grant.
    strange: list[bytes] = field(default_factory=list)
    not_granted: set[Feature] = field(default_factory=set)
    logins: int = 0
    cuts: int = 0
    streams: int = 0
    port: int = 0

    def __post_init__(self) -> None:
        self.written: dict[int, dict[bytes, tuple[int, bytes | None]]] = {n: {} for n in range(self.vbuckets)}
        self.high = dict.fromkeys(range(self.vbuckets), 0)
        self._server: asyncio.Server
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def address(self) -> str:
        return f"upriver://me:{PASSWORD}@127.0.0.1:{self.port}/default"

    def write(self, vbucket: int, key: bytes, value: bytes | None) -> None:
        """Store a value; None deletes."""
        self.high[vbucket] += 1
        self.written[vbucket].pop(key, None)
        self.written[vbucket][key] = self.high[vbucket], value

    def contents(self) -> dict[bytes, bytes]:
        """What it holds."""
        return {key: value for held in self.written.values() for key, (_, value) in held.items() if value is not None}

    async def __aenter__(self) -> "DeployedServer":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        session = _Session(self, writer)
        framer = Framer(MEMCACHED)
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            while data := await reader.read(65536):
                framer.feed(data)
                while (packet := framer.next_packet()) is not None:
                    message = dcp.dcp.decode(packet)
                    if isinstance(message, Request):
                        session.answer(message)
        self._writers.discard(writer)
        writer.close()

    def config(self) -> bytes:
        """The cluster map; its second server has the vbuckets that are elsewhere."""
        ports = [self.port, *self.elsewhere.values()][:2]
        servers = [f"$HOST:{port}" for port in ports]
        owners = [[1 if number in self.elsewhere else 0] for number in range(self.vbuckets)]
        return json.dumps(
            {"rev": 1 + len(self.elsewhere), "vBucketServerMap": {"serverList": servers, "vBucketMap": owners}}
        ).encode()


class _Session:
    def __init__(self, server: DeployedServer, writer: asyncio.StreamWriter) -> None:
        self.server = server
        self.writer = writer
        self.changes = 0
        self.scram: Any = None
        self.logged_in = False

    def put(self, request: Request, status: Status = Status.SUCCESS, value: bytes = b"") -> None:
        self.writer.write(AnyResponse(opcode=request.code, opaque=request.opaque, status=status, value=value).encode())

    def answer(self, request: Request) -> None:
        server = self.server
        match request:
            case memcached.Hello():
                server.not_granted |= set(request.features) - GRANTED
                granted = tuple(each for each in request.features if each in GRANTED)
                self.writer.write(memcached.HelloResponse(opaque=request.opaque, features=granted).encode())
            case memcached.SaslListMechanisms():
                self.put(request, value=b"SCRAM-SHA256 PLAIN")
            case memcached.SaslStep():
                self.scram.set_client_final(request.value.decode())
                self.logged_in = True
                server.logins += 1
                self.put(request, value=self.scram.get_server_final().encode())
            case memcached.SaslAuth():
                self.scram = _MECHANISM.make_server(lambda _: _LOGIN)
                self.scram.set_client_first(request.value.decode())
                self.put(request, Status.AUTH_CONTINUE, self.scram.get_server_first().encode())
            case _ if not self.logged_in:
                self.put(request, Status.EACCESS)
            case memcached.GetClusterConfig():
                self.put(request, value=server.config())
            case memcached.GetAllVbucketSeqnos():
                mine = ((n, high) for n, high in server.high.items() if n not in server.elsewhere)
                self.put(request, value=b"".join(n.to_bytes(2, "big") + high.to_bytes(8, "big") for n, high in mine))
            case dcp.Control() if request.key not in SETTINGS:
                server.strange.append(request.key)
                self.put(request, Status.EINVAL)
            case dcp.StreamRequest():
                self.stream(request)
            case dcp.BufferAck():
                pass
            case _:
                self.put(request)

    def stream(self, request: dcp.StreamRequest) -> None:
        server, number = self.server, request.vbucket
        if number in server.elsewhere:
            self.put(request, Status.NOT_MY_VBUCKET, server.config())
            return
        server.streams += 1
        log = (memcached.FailoverEntry(vbucket_uuid=UUID, seqno=0),)
        self.writer.write(upr.StreamRequestResponse(opaque=request.opaque, log=log).encode())
        where: dict[str, Any] = {"vbucket": number, "opaque": request.opaque}
        start, high = request.start_seqno, server.high[number]
        if high > start and not server.mute:
            first = start + 1 if start else 0
            self.writer.write(dcp.SnapshotMarker(start_seqno=first, end_seqno=high, **where).encode())
            for key, (seqno, value) in server.written[number].items():
                if seqno > start:
                    self.change(key, seqno, value, where)
        if request.end_seqno <= high:
            self.writer.write(dcp.StreamEnd(**where).encode())

    def change(self, key: bytes, seqno: int, value: bytes | None, where: dict[str, Any]) -> None:
        server = self.server
        if server.cut_after is not None and self.changes >= server.cut_after:
            if not self.writer.is_closing():
                server.cuts += 1
                self.writer.close()  # what was written before still goes out
            return
        self.changes += 1
        if value is None:
            self.writer.write(dcp.Deletion(by_seqno=seqno, key=key, **where).encode())
            return
        packed = b"\xff" * 8 if key in server.damaged else _SNAPPY.compress(value, asbytes=True)
        self.writer.write(dcp.Mutation(by_seqno=seqno, key=key, value=packed, datatype=2, **where).encode())
