"""Registered TAP clients over restarts of their node, also over restarts by a crash."""

import dataclasses
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from tests.support.in_memory_node import InMemoryNode
from tests.support.node_process import Client, NodeProcess, refused, wait_until
from tests.support.tap_peer import ACK, BACKFILL, DUMP, KEYS_ONLY, REGISTERED, TapPeer, brief, connect, state_of
from tests.support.tap_sockets import Listener
from upriver.engine import Bucket
from upriver.errors import StorageError
from upriver.model import Snapshot, StreamPosition
from upriver.node import start
from upriver.node.tap.client_registry import TapRegistry
from upriver.protocol.tap.clients import TapClient, TapClients
from upriver.protocol.tap.connect_plan import plan_of
from upriver.protocol.tap.position import LOST, NEVER, TapPosition
from upriver.wire import Message, Response, tap
from upriver.wire.codes import Status
from upriver.wire.dialects.memcached import DeregisterTapClient, Noop, Set, Stat
from upriver.wire.dialects.tap import Control

T = TypeVar("T")
NAME = b"the registered one"
POSITIONS = {1: StreamPosition(2**63 + 5, 7, Snapshot(7, 9)), 3: StreamPosition.at(8, 2)}
PLACES = {
    number: TapPosition(position=position, known=8, since=50, until=6, acks=number == 1, keys_only=False, dumping=True)
    for number, position in POSITIONS.items()
}


def registered(name: str = "client", flags: int = BACKFILL | ACK | REGISTERED, now: float = 100.0) -> TapClient:
    clients = TapClients(10.0)
    client = clients.connected(name, plan_of(connect(name.encode(), flags), now), now)
    clients.left(client, lambda: PLACES, now + 5, elsewhere=PLACES[3], done=False)
    return client


def lost(client: TapClient) -> list[int]:
    """The vbuckets in which the position of the client is unknown."""
    return [number for number, place in client.positions.items() if place.position == LOST]


# What the files hold


@pytest.mark.parametrize("name", ["client", "../../etc/passwd", "ä" * 100, "x" * 250, "\\xff"])
def test_what_is_kept_comes_back(tmp_path: Path, name: str) -> None:
    client = registered(name)
    client.reconnects, client.done = 3, True
    TapRegistry(tmp_path / "clients").keep(client)
    (found,) = TapRegistry(tmp_path / "clients").load(range(4))
    for field in (
        "name",
        "created",
        "flags",
        "plan",
        "registered",
        "connected",
        "reconnects",
        "done",
        "left_at",
        "positions",
        "elsewhere",
    ):
        assert getattr(found, field) == getattr(client, field), field
    TapRegistry(tmp_path / "clients").drop(name)
    assert list(TapRegistry(tmp_path / "clients").load(range(4))) == []


def test_the_position_of_a_client_that_was_connected_is_unknown(tmp_path: Path) -> None:
    client = registered()
    client.connected = True
    TapRegistry(tmp_path).keep(client)
    (found,) = TapRegistry(tmp_path).load(range(4))
    assert sorted(lost(found)) == [0, 1, 2, 3]
    assert not found.connected


def test_where_it_was_not_served_one_that_was_connected_stands_where_it_stood(tmp_path: Path) -> None:
    client = registered()
    assert client.plan is not None
    client.connected, client.plan = True, dataclasses.replace(client.plan, vbuckets=(1,))
    TapRegistry(tmp_path).keep(client)
    (found,) = TapRegistry(tmp_path).load(range(4))
    assert (lost(found), found.positions[3], found.elsewhere) == ([1], PLACES[3], PLACES[3])


@pytest.mark.parametrize(
    ("flags", "date", "since"),
    [
        (BACKFILL | ACK, {"since": 0, "full": True, "whole_from": 0}, 0),
        (BACKFILL | ACK, {"since": 50, "full": False, "whole_from": 50}, 50),
        (ACK, {"since": 0, "full": False, "whole_from": 101}, 101),
        (ACK, {"since": 0, "full": False, "whole_from": 2**64}, NEVER),
        (BACKFILL | KEYS_ONLY | DUMP, {"since": 50, "full": False}, NEVER),  # the oldest say nothing of it
    ],
)
@pytest.mark.parametrize("listed", [None, [1, 3]])
@pytest.mark.parametrize("done", [None, False, True])
def test_a_file_of_an_older_version_can_be_read(
    tmp_path: Path, flags: int, date: dict[str, int], since: int, listed: list[int] | None, done: bool | None
) -> None:
    """There all that was sent was sent for the last plan, of which a date was a part."""
    client = registered(flags=flags | REGISTERED)
    assert client.plan is not None
    TapRegistry(tmp_path).keep(client)
    (path,) = tmp_path.iterdir()
    stored = json.loads(path.read_bytes())
    del stored["elsewhere"], stored["done"], stored["positions"]
    stored["plan"] |= date | {"vbuckets": listed}
    stored["places"] = {number: [p.vbucket_uuid, p.seqno, p.snapshot.end] for number, p in POSITIONS.items()}
    path.write_text(json.dumps(stored if done is None else stored | {"done": done}))
    (found,) = TapRegistry(tmp_path).load(range(4))
    served = {
        "acks": client.plan.acks,
        "keys_only": client.plan.keys_only,
        "dumping": client.plan.dump and not done,
    }
    # Whatever lies behind is owed, and what lies before was sent as far as it is new enough.
    assert found.positions == {
        number: TapPosition(position=place, known=place.seqno, since=since, until=place.seqno, **served)
        for number, place in POSITIONS.items()
    }
    assert (found.elsewhere is None) == (listed is not None)


def test_each_client_has_a_file_of_its_own(tmp_path: Path) -> None:
    registry = TapRegistry(tmp_path)
    for name in ("a", "b", "c", "b"):
        registry.keep(registered(name))
    registry.drop("c")
    assert sorted(client.name for client in registry.load(())) == ["a", "b"]


def test_what_a_crash_left_half_written_is_cleared_away(tmp_path: Path) -> None:
    registry = TapRegistry(tmp_path)
    registry.keep(registered())
    (tmp_path / "half.json.new").write_bytes(b'{"na')
    assert len(list(registry.load(()))) == 1
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda stored: b"{",
        lambda stored: b"[]",
        lambda stored: b"\xff\xfe",
        lambda stored: json.dumps({**stored, "plan": None}).encode(),
        lambda stored: json.dumps({**stored, "places": {"1": [1, 5, 2]}}).encode(),
        lambda stored: json.dumps({**stored, "places": {"1": [1]}}).encode(),
        lambda stored: json.dumps({name: value for name, value in stored.items() if name != "name"}).encode(),
    ],
)
def test_a_file_that_makes_no_sense_is_named(tmp_path: Path, spoil: Callable[[dict[str, object]], bytes]) -> None:
    registry = TapRegistry(tmp_path)
    registry.keep(registered())
    (path,) = tmp_path.iterdir()
    path.write_bytes(spoil(json.loads(path.read_bytes())))
    with pytest.raises(StorageError, match="remove the file"):
        list(registry.load(()))


def test_without_a_directory_nothing_is_kept() -> None:
    registry = TapRegistry(None)
    registry.keep(registered())
    registry.drop("client")
    assert list(registry.load(range(4))) == []


class FailingDisk(TapRegistry):
    """A registry whose disk fails when told to."""

    fails = False

    def keep(self, client: TapClient) -> None:
        if self.fails:
            raise StorageError("disk", "full")
        super().keep(client)

    def drop(self, name: str) -> None:
        if self.fails:
            raise StorageError("disk", "full")
        super().drop(name)


class Errands:
    """A scheduler that runs the work beside the sessions when the test asks for it."""

    def __init__(self) -> None:
        self.due: list[Callable[[], object]] = []

    def on_disk(self, work: Callable[[], T], done: Callable[[T], object]) -> None:
        self.due.append(lambda: done(work()))

    def run(self) -> None:
        """Do the first of it."""
        self.due.pop(0)()


@pytest.fixture
def disk(tmp_path: Path) -> FailingDisk:
    return FailingDisk(tmp_path / "directory")


def service(disk: TapRegistry) -> InMemoryNode:
    node = InMemoryNode(tap_registry=disk)
    node.bucket.create_vbucket(1)
    return node


def test_a_client_that_cannot_be_stored_is_refused_and_one_that_leaves_unstored_is_named(
    disk: FailingDisk, caplog: pytest.LogCaptureFixture
) -> None:
    node = service(disk)
    request = connect(NAME, ACK | REGISTERED)
    disk.fails = True
    peer = TapPeer(node, request)
    assert brief(peer.run()) == ["etmpfail"]
    assert peer.closed
    assert not any(client.registered for client in node.tap.clients)
    disk.fails = False
    peer = TapPeer(node, request)
    peer.run()
    disk.fails = True
    peer.leave()
    node.settle()
    assert "starts over after a restart" in caplog.text
    (client,) = disk.load(range(4))
    assert sorted(lost(client)) == [0, 1, 2, 3]


def test_a_client_that_cannot_be_forgotten_stays_registered(disk: FailingDisk) -> None:
    node = service(disk)
    peer = TapPeer(node, connect(NAME, ACK | REGISTERED))
    peer.run()
    ask, request = node.connect(), DeregisterTapClient(name=NAME)
    disk.fails = True
    (answer,) = ask.send(request)
    assert isinstance(answer, Response)
    assert answer.status is Status.ETMPFAIL
    assert b"still registered" in answer.value  # type: ignore[attr-defined]
    disk.fails = False
    assert brief(ask.send(request)) == ["success"]
    assert list(disk.load(range(4))) == []


def test_nothing_is_sent_before_the_disk_knows_that_somebody_is_connected(
    disk: FailingDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, errands = service(disk), Errands()
    monkeypatch.setattr(node.scheduler, "on_disk", errands.on_disk)
    node.write(1, b"a")
    peer = TapPeer(node, connect(NAME, BACKFILL | REGISTERED))
    assert peer.run() == []
    assert brief(peer.peer.send(Noop())) == ["success"]  # it does not wait for the disk
    errands.run()
    assert [lost(client) for client in disk.load((1,))] == [[1]]
    assert brief(peer.run())[:2] == ["#initial_vbucket_stream", "a=v"]
    # The client that replaces it waits for what is on its way, and only for the last of what follows.
    again = TapPeer(node, connect(NAME, BACKFILL | REGISTERED))
    for _ in range(5):
        again = TapPeer(node, connect(NAME, BACKFILL | REGISTERED))
    assert again.run() == []
    errands.run()
    assert again.run() == []
    errands.run()
    assert brief(again.run())[:2] == ["#initial_vbucket_stream", "a=v"]
    assert errands.due == []


def test_a_deregistration_is_confirmed_when_the_disk_has_done_it(
    disk: FailingDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, errands = service(disk), Errands()
    monkeypatch.setattr(node.scheduler, "on_disk", errands.on_disk)
    peer, ask = TapPeer(node, connect(NAME, REGISTERED)), node.connect()
    errands.run()
    assert ask.send(DeregisterTapClient(name=NAME)) == []
    assert brief(peer.run())[-1:] == ["#close_tap_stream"]
    # What is being removed and at once registered again is there in the end.
    TapPeer(node, connect(NAME, REGISTERED))
    assert ask.send(DeregisterTapClient(name=NAME)) == []
    TapPeer(node, connect(NAME, REGISTERED))
    errands.run()
    assert brief(ask.send()) == ["success"]
    errands.run()
    assert brief(ask.send()) == ["success"]
    assert [client.name for client in disk.load((1,))] == [NAME.decode()]
    assert errands.due == []


# Nodes that are killed


class Data:
    """The data directory of a node that is started again and again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.served = self._serve()

    def _serve(self) -> NodeProcess:
        arguments = "--port", "0", "--data", str(self.path), "--vbuckets", "4", "--initial-vbuckets", "1-2"
        return NodeProcess(*arguments, "--ack", "disk")

    def kill(self) -> None:
        """End the process without a word, and start another one."""
        self.served.__exit__()
        self.served = self._serve()

    def stop(self) -> None:
        """End it in peace, and start another one."""
        self.served.stop()
        self.served = self._serve()

    def listen(self, flags: int = 0) -> Listener:
        """Connect, and wait until the node has begun to send."""
        listener = Listener(self.served.port, connect(NAME, ACK | REGISTERED | flags))
        wait_until(lambda: self.about("connected") == "true" and self.about("persisted") == "true")
        return listener

    def write(self, key: bytes, vbucket: int = 1) -> None:
        with Client(self.served.port) as client:
            assert client.ask(Set(key=key, value=b"v", vbucket=vbucket)).status == 0

    def about(self, what: str) -> str | None:
        return self.statistic(b"tap", b"eq_tapq:" + NAME + b":" + what.encode())

    def statistic(self, group: bytes, key: bytes) -> str | None:
        with Client(self.served.port) as client:
            client.send(Stat(key=group))
            while body := client.reply().body:
                if body.startswith(key):
                    return body.removeprefix(key).decode()
        return None

    def gone(self) -> None:
        """Wait until the node knows that the client has gone."""
        wait_until(lambda: self.about("connected") == "false" and self.about("persisted") == "true")


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Data]:
    opened = Data(tmp_path / "data")
    try:
        yield opened
    finally:
        opened.served.__exit__()


def up_to(listener: Listener, key: bytes) -> list[Message]:
    return list(listener.until(lambda message: isinstance(message, tap.Mutation) and message.key == key))


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_client_that_was_away_goes_on_where_it_had_acknowledged(data: Data, end: str) -> None:
    with data.listen(BACKFILL) as listener:
        data.write(b"one")
        up_to(listener, b"one")
        # Its next change is sent when everything before is acknowledged, as far as the client knows.
        data.write(b"two", 2)
        up_to(listener, b"two")
        wait_until(lambda: data.about("unacked") == "0")
    data.gone()
    data.write(b"away")
    getattr(data, end)()
    assert (data.about("registered"), data.about("connected")) == ("true", "false")
    data.write(b"back")
    with data.listen(BACKFILL) as listener:
        found = brief(up_to(listener, b"back"))
    assert [each for each in found if "=" in each] == ["away=v", "back=v"]
    assert "#initial_vbucket_stream" not in found
    assert data.about("reconnects") == "1"


def test_what_a_crash_has_lost_does_not_stay_with_a_client_that_was_connected(data: Data) -> None:
    with data.listen() as listener:
        data.write(b"kept")
        held = up_to(listener, b"kept")
        with Client(data.served.port) as client:
            client.send(tap.Opaque(control=Control.START_ONLINEUPDATE))
            # What came before is written; from then on nothing more.
            wait_until(lambda: data.statistic(b"", b"ep_flusher_state") == "paused")
            client.send(Set(key=b"lost", value=b"v", vbucket=1))
        held += up_to(listener, b"lost")
        data.kill()
    data.write(b"new")
    with data.listen() as listener:
        held += up_to(listener, b"new")
    assert state_of(held) == {b"kept": b"v", b"new": b"v"}


def test_a_client_that_is_cut_by_a_stop_goes_on(data: Data) -> None:
    with data.listen() as listener:
        data.write(b"one")
        up_to(listener, b"one")
        wait_until(lambda: data.about("unacked") == "0")
        data.stop()
    data.write(b"two")
    with data.listen() as listener:
        assert [each for each in brief(up_to(listener, b"two")) if "=" in each] == ["two=v"]


def test_a_deregistered_client_stays_deregistered(data: Data) -> None:
    data.listen().__exit__()
    data.gone()
    with Client(data.served.port) as client:
        assert client.ask(DeregisterTapClient(name=NAME)).status == 0
    data.kill()
    assert data.about("registered") is None


def test_a_spoiled_file_is_told_before_anybody_is_served(tmp_path: Path) -> None:
    Bucket.open(tmp_path / "data").close()
    directory = tmp_path / "data" / "tap-clients"
    directory.mkdir()
    (directory / "x.json").write_bytes(b"{}")
    said = refused("--port", "0", "--data", str(tmp_path / "data"))
    assert "x.json" in said
    assert "remove the file" in said


# Many clients


def test_clients_that_are_away_cost_little(tmp_path: Path) -> None:
    count = 20
    with start(vbuckets=1024, data=tmp_path) as node, Client(node.port) as writer:
        for vbucket in range(1024):
            writer.send(Set(key=b"k", value=b"v", vbucket=vbucket))
        for _ in range(1024):
            assert writer.reply().status == 0
        for number in range(count):
            with Listener(node.port, connect(b"%d" % number, ACK | REGISTERED)) as listener:
                list(listener.until(lambda message: "open_checkpoint" in brief([message])[0]))
        service = node.call(lambda: node.node.state.tap)
        assert service is not None
        wait_until(lambda: not list(service) and service.idle, "all positions are stored")
        assert max(len(client.table.packed) for client in service.clients) < 16_000
    files = list((tmp_path / "tap-clients").iterdir())
    assert len(files) == count
    assert max(file.stat().st_size for file in files) < 24_000
    with start(vbuckets=1024, data=tmp_path) as node, Listener(node.port, connect(b"7", ACK | REGISTERED)) as listener:
        with Client(node.port) as writer:
            writer.set(b"after", b"v", vbucket=1)
        found = [m for m in listener.until(lambda m: isinstance(m, tap.Mutation)) if isinstance(m, tap.Mutation)]
        assert [message.key for message in found] == [b"after"]


@pytest.mark.slow
def test_a_thousand_clients_are_read_quickly_and_take_little_memory(tmp_path: Path) -> None:
    """As objects they took 300 MiB, and 7 s at the start."""
    plan = plan_of(connect(b"n", ACK | REGISTERED), 100.0)
    place = TapPosition.first(plan, 2**47 + 12345, 1000)
    clients, registry = TapClients(10.0), TapRegistry(tmp_path)
    for number in range(1000):
        client = clients.connected(str(number), plan, 100.0)
        clients.left(client, lambda: dict.fromkeys(range(1024), place), 100.0, done=False)
        registry.keep(client)
    started = time.perf_counter()
    found = list(registry.load(range(1024)))
    assert time.perf_counter() - started < 3
    tracemalloc.start()
    again = list(registry.load(range(100)))
    assert len(again) == len(found) == 1000
    assert tracemalloc.get_traced_memory()[0] < 24 * 2**20
    tracemalloc.stop()
