"""Many clients, and bad ones: they harm no other client, and nothing of them stays.

One process serves all these tests. Each begins by looking at what the process has open and how much memory it holds,
and ends when that is so again; meanwhile another client is served within a deadline.
"""

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.node_process import (
    BackgroundClient,
    Client,
    NodeProcess,
    descriptors,
    gets,
    noops,
    rss_bytes,
    served_meanwhile,
    wait_until,
)
from upriver.node.logs import LINES_MAX
from upriver.wire.dialects.memcached import Get, Noop, Set, Touch

#: Ten thousand connections leave a heap of 32 MiB, which the next ones use again; other growth is far below.
RSS_SLACK_BYTES = 40 * 2**20


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    log = tmp_path_factory.mktemp("log") / "node.log"
    with NodeProcess("--port", "0", "--vbuckets", "4", "--log-level", "info", log=log) as served:
        with Client(served.port) as client:  # whatever a first request allocates
            client.set(b"key", b"v" * 1000)
        yield served
        served.stop()
    text = log.read_text()
    assert "Traceback" not in text
    assert "ERROR" not in text


@pytest.fixture
def probe(served: NodeProcess) -> Iterator[BackgroundClient]:
    """Another client, served all the time; and in the end the process is as it was."""
    open_before, rss_before = descriptors(served.pid), rss_bytes(served.pid)
    with served_meanwhile(served.port) as probe:
        yield probe
    wait_until(lambda: descriptors(served.pid) <= open_before, "descriptors are closed")
    wait_until(lambda: rss_bytes(served.pid) <= rss_before + RSS_SLACK_BYTES, "memory is given back")


def connected(served: NodeProcess, count: int) -> list[socket.socket]:
    return [socket.create_connection(("127.0.0.1", served.port), 30) for _ in range(count)]


def test_a_thousand_idle_and_two_hundred_busy(served: NodeProcess, probe: BackgroundClient) -> None:
    before = descriptors(served.pid)
    idle = connected(served, 1000)
    busy = connected(served, 200)
    wait_until(lambda: descriptors(served.pid) >= before + 1200)
    pipeline, size = gets(b"key", 50), 50 * (24 + 4 + 1000)
    for _ in range(10):
        for each in busy:
            each.sendall(pipeline)
        for each in busy:
            left = size
            while left:
                left -= len(each.recv(left))
        probe.another_round()
    for each in idle:  # and the idle ones are still served
        each.sendall(Noop().encode())
    for each in idle:
        assert each.recv(24)[:2] == b"\x81\x0a"
        each.close()
    for each in busy:
        each.close()


def test_one_byte_at_a_time(served: NodeProcess, probe: BackgroundClient) -> None:
    """A byte a second, without the second: each comes after somebody else was served."""
    packet = Set(key=b"slow", value=b"value").encode()
    slow = [Client(served.port) for _ in range(5)]
    for byte in packet:
        for client in slow:
            client.socket.sendall(bytes([byte]))
        probe.another_round()
    for client in slow:
        assert client.reply().status == 0
        client.close()


def test_garbage_from_everywhere(served: NodeProcess, probe: BackgroundClient) -> None:
    for each in connected(served, 200):
        with each, contextlib.suppress(ConnectionError):
            each.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 100)
            assert each.recv(1) == b""
    wait_until(lambda: served.log.read_text().count("found 0x47") == LINES_MAX, "one line each, but not too many")
    probe.another_round()


def test_a_length_of_4_gib(served: NodeProcess, probe: BackgroundClient) -> None:
    rss = rss_bytes(served.pid)
    for each in connected(served, 100):
        with each, contextlib.suppress(ConnectionError):
            each.sendall(struct.pack(">BBHBBHIIQ", 0x80, 0x01, 3, 8, 0, 0, 0xFFFFFFFF, 0, 0))
            received = b""
            while piece := each.recv(1000):
                received += piece
            assert received[6:8] == b"\0\x03"  # too big
    assert rss_bytes(served.pid) < rss + RSS_SLACK_BYTES
    assert "a length of 4294967295" in served.log.read_text()
    probe.another_round()


def test_a_length_that_never_comes(served: NodeProcess, probe: BackgroundClient) -> None:
    """Memory is taken for what has come, not for what was announced."""
    rss = rss_bytes(served.pid)
    announced = connected(served, 200)
    for each in announced:
        each.sendall(struct.pack(">BBHBBHIIQ", 0x80, 0x01, 3, 8, 0, 0, 20 * 2**20, 0, 0) + bytes(1000))
    for _ in range(5):
        probe.another_round()
    assert rss_bytes(served.pid) < rss + RSS_SLACK_BYTES
    for each in announced:
        each.close()


def test_half_a_frame_and_then_silence(tmp_path: Path) -> None:
    """Small ones and large ones: they are closed, and what was kept of them is given back."""
    log = tmp_path / "node.log"
    with NodeProcess("--port", "0", "--vbuckets", "1", "--stuck-s", "1.5", log=log) as served:
        before, rss = descriptors(served.pid), rss_bytes(served.pid)
        with served_meanwhile(served.port):
            silent = connected(served, 100)
            packet = Set(key=b"key", value=bytes(5 * 2**20)).encode()
            for number, each in enumerate(silent):
                each.sendall(packet[: 4 * 2**20 if number % 10 == 0 else 30])
            for each in silent:
                with each, contextlib.suppress(ConnectionError):
                    assert each.recv(1) == b""
        wait_until(lambda: descriptors(served.pid) <= before)
        wait_until(lambda: rss_bytes(served.pid) <= rss + RSS_SLACK_BYTES, "memory is given back")
        assert log.read_text().count("closed: idle for 1.5 s, half a request came") == LINES_MAX


def test_half_requests_of_some_take_nothing_from_the_others(tmp_path: Path) -> None:
    """Silent peers use all memory for half requests: other peers that send requests in pieces are still served."""
    log = tmp_path / "node.log"
    limit = 32 * 2**20
    with (
        NodeProcess("--port", "0", "--vbuckets", "1", "--partial-bytes-max", str(limit), log=log) as served,
        served_meanwhile(served.port),
    ):
        rss = rss_bytes(served.pid)
        silent = connected(served, 8)
        half = Set(key=b"silent", value=bytes(20 * 2**20 - 100)).encode()[: limit // 8]
        for each in silent:
            each.sendall(half)
        wait_until(lambda: rss_bytes(served.pid) > rss + limit // 2, "it is kept")
        pieces = [Set(key=b"%d" % number, value=bytes(30_000), opaque=number).encode() for number in range(100)]
        for _ in range(10):
            with Client(served.port) as client:
                sender = threading.Thread(target=client.socket.sendall, args=(b"".join(pieces),))
                sender.start()
                for number in range(100):
                    reply = client.reply()
                    assert (reply.opaque, reply.status) == (number, 0)
                sender.join()
                client.set(b"larger", bytes(500_000))
        for each in silent:
            each.close()
    lines = log.read_text()
    assert 1 <= lines.count("closed: half-received requests of all connections") <= 8
    assert "Traceback" not in lines


def test_readers_that_stop_reading(served: NodeProcess, probe: BackgroundClient) -> None:
    """Each asks for gigabytes and reads nothing: what is held for it is bounded."""
    with Client(served.port) as client:
        client.set(b"large", b"v" * 500_000)
    rss = rss_bytes(served.pid)
    pipeline = gets(b"large", 5000)
    stuck = [Client(served.port, receive_bytes=4096) for _ in range(10)]
    for client in stuck:
        client.socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            for at in range(0, len(pipeline), 65536):
                client.socket.send(pipeline[at : at + 65536])
    for _ in range(10):
        probe.another_round()
    grown = rss_bytes(served.pid) - rss
    assert grown < len(stuck) * 4 * 2**20 + RSS_SLACK_BYTES
    for client in stuck:
        client.close()


def test_readers_that_stop_in_the_middle_of_twenty_mebibytes(tmp_path: Path) -> None:
    """One answer may be large, so all are bounded together: who does not read is cut off, others are served."""
    log = tmp_path / "node.log"
    limit, size, cut_off = 64 * 2**20, 20 * 2**20, "cut off: unread answers of all connections"
    with NodeProcess("--port", "0", "--vbuckets", "1", "--unread-total-bytes-max", str(limit), log=log) as served:
        with served_meanwhile(served.port) as probe, Client(served.port) as client:
            client.set(b"large", bytes(size))
            assert client.get(b"large") == bytes(size)  # whatever a first one allocates
            rss, worst = rss_bytes(served.pid), 0
            stuck = [Client(served.port, receive_bytes=4096) for _ in range(30)]
            for each in stuck:
                each.send(*[Get(key=b"large")] * 3)
                probe.another_round()
                worst = max(worst, rss_bytes(served.pid))
            assert client.get(b"large") == bytes(size)
            wait_until(lambda: log.read_text().count(cut_off) >= LINES_MAX, "who does not read goes after a moment")
            for each in stuck:
                each.close()
        # Twice the limit for a moment, and what is copied for the answer that is being made.
        assert worst - rss < 2 * limit + 3 * size


def test_a_reader_that_stops_and_goes_on_misses_nothing(served: NodeProcess, probe: BackgroundClient) -> None:
    count = 20_000
    with Client(served.port, receive_bytes=4096) as client:
        sender = threading.Thread(target=client.socket.sendall, args=(gets(b"key", count),))
        sender.start()
        for _ in range(10):
            probe.another_round()
        for number in range(count):
            assert client.reply().opaque == number
        sender.join()


def test_pipelines_without_end(served: NodeProcess, probe: BackgroundClient) -> None:
    """Two clients that always have something to ask, one in the short way and one in the long one."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def ask(pipeline: bytes) -> None:
        try:
            with Client(served.port) as client:
                sender = threading.Thread(target=send, args=(client.socket, pipeline))
                sender.start()
                while client.socket.recv(1 << 20):
                    pass
                sender.join()
        except BaseException as error:
            failures.append(error)

    def send(plain: socket.socket, pipeline: bytes) -> None:
        while not stop.is_set():
            plain.sendall(pipeline)
        plain.shutdown(socket.SHUT_WR)

    askers = [threading.Thread(target=ask, args=(pipeline,)) for pipeline in (gets(b"key", 5000), noops(5000))]
    for asker in askers:
        asker.start()
    for _ in range(5):
        probe.another_round()
    stop.set()
    for asker in askers:
        asker.join()
    assert not failures


def test_small_requests_that_copy_megabytes() -> None:
    """A pipeline of touches is some bytes, and a whole value copied for each: others are served in between."""
    with NodeProcess("--port", "0", "--vbuckets", "1") as served, served_meanwhile(served.port) as probe:
        with Client(served.port) as client:
            client.set(b"large", bytes(4 * 2**20))
            count = 200  # as many as a turn could hold if it ended by their number only
            client.send(*[Touch(key=b"large", expiration=0)] * count)
            done = int(client.reply().status == 0)
            rounds = probe.rounds
            done += sum(client.reply().status == 0 for _ in range(count - 1))
            rounds = probe.rounds - rounds
        assert done > count // 40  # on a busy machine memory runs out earlier, and more are refused
        assert rounds >= 8


def storm(served: NodeProcess, probe: BackgroundClient, count: int) -> None:
    for number in range(count):
        each = socket.create_connection(("127.0.0.1", served.port), 30)
        if number % 3 == 1:
            each.sendall(Get(key=b"key").encode())
        elif number % 3 == 2:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            each.sendall(b"\x80")
        each.close()
        if number % 500 == 0:
            probe.another_round()


def test_two_thousand_connects_and_disconnects(served: NodeProcess, probe: BackgroundClient) -> None:
    storm(served, probe, 2000)


@pytest.mark.slow
def test_ten_thousand_connects_and_disconnects(served: NodeProcess, probe: BackgroundClient) -> None:
    storm(served, probe, 10_000)


@pytest.mark.slow
def test_ten_thousand_at_once(served: NodeProcess, probe: BackgroundClient) -> None:
    before = descriptors(served.pid)
    idle = connected(served, 9000)
    wait_until(lambda: descriptors(served.pid) >= before + 9000)
    probe.another_round()
    for each in idle:
        each.close()


def test_more_connections_than_allowed(tmp_path: Path) -> None:
    log = tmp_path / "node.log"
    with NodeProcess("--port", "0", "--vbuckets", "1", "--connections-max", "50", log=log) as served:
        before = descriptors(served.pid)
        with served_meanwhile(served.port):
            allowed = connected(served, 49)
            wait_until(lambda: descriptors(served.pid) >= before + 50)
            for each in connected(served, 100):
                with each, contextlib.suppress(ConnectionError):
                    assert each.recv(1) == b""
            for each in allowed:
                each.close()
        wait_until(lambda: descriptors(served.pid) <= before)
        assert log.read_text().count("refused: 50 connections are open") == LINES_MAX
