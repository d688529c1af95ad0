"""A node inside this process: starting, failing to start, stopping under all circumstances."""

import contextlib
import gc
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import upriver.node
from tests.support.command_peers import SocketPeer
from tests.support.node_process import Client, descriptors, gets, threads, wait_until
from upriver.errors import CannotListen, CorruptData, DataInUse, InvalidArguments, StorageError, UsersFileError
from upriver.model import VbucketState
from upriver.node.embedded import EmbeddedNode, start
from upriver.node.options import NodeOptions
from upriver.wire import memcached
from upriver.wire.codes import Status
from upriver.wire.dialects.memcached import (
    DeleteVbucket,
    GetClusterConfig,
    GetClusterConfigResponse,
    Noop,
    Set,
    SetVbucket,
)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Whatever a test does, it leaves neither threads nor descriptors behind."""
    gc.collect()
    before, open_before = threads(), descriptors()
    yield
    gc.collect()
    wait_until(lambda: threads() <= before, f"threads end: {threads() - before}")
    wait_until(lambda: descriptors() <= open_before, "descriptors are closed")


def test_the_package_offers_it() -> None:
    assert upriver.node.start is start
    assert upriver.node.EmbeddedNode is EmbeddedNode
    assert upriver.node.NodeOptions is NodeOptions
    assert upriver.node.Node.__name__ == "Node"
    with pytest.raises(AttributeError, match="no attribute 'stop'"):
        upriver.node.stop  # noqa: B018


def test_a_node_on_a_free_port_of_loopback() -> None:
    with start(vbuckets=4) as node:
        assert node.host == "127.0.0.1"
        assert node.port > 0
        assert node.address == f"127.0.0.1:{node.port}"
        assert node.metrics_port is None
        with Client(node.port) as client:
            client.set(b"key", b"value", vbucket=3)
            assert client.get(b"key", vbucket=3) == b"value"


def test_two_nodes_beside_each_other() -> None:
    with start(vbuckets=1) as one, start(vbuckets=1) as two, Client(one.port) as first, Client(two.port) as second:
        first.set(b"key", b"one")
        second.set(b"key", b"two")
        assert (first.get(b"key"), second.get(b"key")) == (b"one", b"two")


def test_starting_takes_well_below_a_second() -> None:
    start(vbuckets=64).close()  # the first start waits for imports
    best = min(_start_s() for _ in range(3))
    assert best < 0.5


def _start_s() -> float:
    begun = time.monotonic()
    with start(vbuckets=64):
        return time.monotonic() - begun


def test_data_outlives_the_node(tmp_path: Path) -> None:
    for round_ in range(3):
        with start(vbuckets=2, data=tmp_path / "data") as node, Client(node.port) as client:
            if round_:
                assert client.get(b"key", vbucket=1) == b"%d" % (round_ - 1)
            client.set(b"key", b"%d" % round_, vbucket=1)
            assert len(list(node.call(node.bucket.vbucket, 1).failover_log)) == 1  # a clean stop starts no new branch


def test_a_node_that_gave_all_its_vbuckets_away_owns_none_after_a_restart(tmp_path: Path) -> None:
    with start(vbuckets=2, data=tmp_path / "data") as node, SocketPeer(node.host, node.port) as peer:
        for number in range(2):
            assert peer.ask(SetVbucket(vbucket=number, state=memcached.VbucketState.DEAD)).status is Status.SUCCESS
            assert peer.ask(DeleteVbucket(vbucket=number)).status is Status.SUCCESS
    with start(vbuckets=2, data=tmp_path / "data") as node:
        assert node.call(node.bucket.numbers) == []


# The bucket, from outside


def test_calls_run_in_the_thread_of_the_node() -> None:
    with start(vbuckets=4, initial_vbuckets="0-1") as node:
        assert node.call(threading.current_thread).name == "upriver-node"
        assert node.call(node.bucket.numbers) == [0, 1]
        node.call(node.bucket.create_vbucket, 2, state=VbucketState.REPLICA)
        assert node.call(node.call, node.bucket.numbers) == [0, 1, 2]
        with pytest.raises(ZeroDivisionError):
            node.call(lambda: 1 // 0)
    with pytest.raises(RuntimeError, match="the node is closed"):
        node.call(node.bucket.numbers)


def test_clients_see_the_roles_that_the_program_gives_to_vbuckets() -> None:
    with start(vbuckets=2, initial_vbuckets="0") as node, SocketPeer(node.host, node.port) as peer:
        node.call(node.bucket.create_vbucket, 1)
        assert _owned(peer) == [[0], [0]]
        node.call(node.bucket.vbucket(0).set_state, VbucketState.REPLICA)
        assert _owned(peer) == [[-1], [0]]


def _owned(peer: SocketPeer) -> object:
    answer = peer.ask(GetClusterConfig())
    assert isinstance(answer, GetClusterConfigResponse)
    return json.loads(answer.config)["vBucketServerMap"]["vBucketMap"]


# Failing to start


def test_a_taken_port() -> None:
    with start(vbuckets=1) as node:
        with pytest.raises(CannotListen, match=f"cannot listen on 127.0.0.1:{node.port}: Address already in use") as e:
            start(vbuckets=1, port=node.port)
        assert (e.value.host, e.value.port) == ("127.0.0.1", node.port)


def test_a_taken_port_lets_go_of_the_data(tmp_path: Path) -> None:
    with start(vbuckets=1) as node, pytest.raises(CannotListen):
        start(vbuckets=1, port=node.port, data=tmp_path)
    start(vbuckets=1, data=tmp_path).close()


def test_a_taken_metrics_port() -> None:
    with start(vbuckets=1) as node, pytest.raises(CannotListen, match="in use"):
        start(vbuckets=1, metrics_port=node.port)


def test_a_host_that_is_not_here() -> None:
    with pytest.raises(CannotListen, match="cannot listen on "):
        start(vbuckets=1, host="host.invalid", insecure=True)


def test_data_in_use(tmp_path: Path) -> None:
    with start(vbuckets=1, data=tmp_path) as node:
        with pytest.raises(DataInUse):
            start(vbuckets=1, data=tmp_path)
        with Client(node.port) as client:
            assert client.ask(Noop()).status == 0


def test_data_with_another_number_of_vbuckets(tmp_path: Path) -> None:
    start(vbuckets=2, data=tmp_path).close()
    with pytest.raises(StorageError, match="2 vbuckets, not 4"):
        start(vbuckets=4, data=tmp_path)


def test_bad_options_and_files(tmp_path: Path) -> None:
    with pytest.raises(InvalidArguments):
        start(vbuckets=3)
    with pytest.raises(InvalidArguments, match="loopback"):
        start(host="0.0.0.0")
    with pytest.raises(TypeError):
        start(vbukets=4)
    with pytest.raises(UsersFileError):
        start(users=tmp_path / "users.json")
    with pytest.raises(InvalidArguments, match=r"cannot use the certificate .*: No such file"):
        start(tls_cert=tmp_path / "cert.pem", tls_key=tmp_path / "key.pem")
    start(vbuckets=1, data=tmp_path / "data").close()
    (tmp_path / "data" / "data.mdb").write_bytes(b"damage" * 10_000)
    with pytest.raises(CorruptData):
        start(vbuckets=1, data=tmp_path / "data")


# Stopping


def test_closing_twice_and_from_two_threads() -> None:
    node = start(vbuckets=1)
    others = [threading.Thread(target=node.close) for _ in range(3)]
    for other in others:
        other.start()
    node.close()
    node.close()
    for other in others:
        other.join()
    assert node.port  # what it was may still be asked


def test_closing_with_open_connections() -> None:
    node = start(vbuckets=1)
    clients = [Client(node.port) for _ in range(20)]
    for client in clients:
        client.ask(Noop())
    clients[0].socket.sendall(Set(key=b"key", value=b"value").encode()[:30])
    begun = time.monotonic()
    node.close()
    assert time.monotonic() - begun < 2  # it does not wait for the clients
    for client in clients:
        assert client.is_closed()
        client.close()


def test_closing_with_a_stuck_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upriver.node.server.STOP_WAIT_S", 0.2)
    node = start(vbuckets=1)
    with Client(node.port, receive_bytes=4096) as client:
        client.set(b"key", b"v" * 1_000_000)
        client.socket.sendall(gets(b"key", 100))
        wait_until(lambda: node.call(lambda: any(c.held_bytes for c in node.node.state.connections)))
        node.close()


def test_closing_during_load(tmp_path: Path) -> None:
    node = start(vbuckets=4, data=tmp_path)
    written = [0] * 4
    failures: list[Exception] = []

    def write(vbucket: int) -> None:
        try:
            with Client(node.port) as client, contextlib.suppress(EOFError, ConnectionError):
                while True:
                    client.set(b"%d" % (written[vbucket] + 1), b"value", vbucket=vbucket)
                    written[vbucket] += 1
        except Exception as error:
            failures.append(error)

    writers = [threading.Thread(target=write, args=(vbucket,)) for vbucket in range(4)]
    for writer in writers:
        writer.start()
    wait_until(lambda: min(written) > 50)
    node.close()
    for writer in writers:
        writer.join()
    assert not failures
    with start(vbuckets=4, data=tmp_path) as node, Client(node.port) as client:
        for vbucket, last in enumerate(written):
            for number in range(1, last + 1):
                assert client.get(b"%d" % number, vbucket=vbucket) == b"value"


def test_closing_answers_who_waits_for_the_disk(tmp_path: Path) -> None:
    node = start(vbuckets=1, ack="disk", data=tmp_path)
    node.call(node.bucket.flusher.stop)
    with Client(node.port) as client:
        client.send(Set(key=b"key", value=b"value"))
        wait_until(lambda: node.call(lambda: node.bucket.vbucket(0).high_seqno) == 1)
        node.close()
        assert client.reply().status == 0
        assert client.socket.recv(1) == b""


def test_a_storm_of_connections_while_closing() -> None:
    node = start(vbuckets=1)
    stop = threading.Event()

    def storm() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", node.port), 5) as one:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    stormers = [threading.Thread(target=storm) for _ in range(3)]
    for stormer in stormers:
        stormer.start()
    wait_until(lambda: node.node.state.counters.connections_total > 100)
    node.close()
    stop.set()
    for stormer in stormers:
        stormer.join()


def test_what_goes_wrong_while_closing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = start(vbuckets=1, data=tmp_path)

    def full(_: object) -> None:
        raise StorageError(str(tmp_path), "no space left")

    monkeypatch.setattr(node.bucket.storage, "commit", full)
    with pytest.raises(StorageError, match="no space left"):
        node.close()
    node.close()
