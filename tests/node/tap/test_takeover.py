"""A takeover over TAP between two processes, under write load, while one of them is killed.

Whatever happens, at most one of the two is active. Once the operator has asked both and made one of them active, it
has every write that was acknowledged.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.node_process import Client, NodeProcess, wait_until
from tests.support.tap_peer import ACK, LIST, TAKEOVER, connect
from tests.support.tap_sockets import Relay
from upriver.wire import Message, Response, tap
from upriver.wire.dialects.memcached import Get, GetVbucket, Set, SetVbucket, VbucketState

VBUCKET = 1
WRITTEN_BEFORE = 2000

#: When one of the two is killed: the message that the relay is about to pass on. The answer to *active* is the second
#: one to a set vbucket; the first, to *pending*, has a small number.
MOMENTS: dict[str, Callable[[Message], bool]] = {
    "in the backfill": lambda message: isinstance(message, tap.Mutation) and message.opaque > WRITTEN_BEFORE // 2,
    "before it is active": lambda message: isinstance(message, tap.SetVbucket) and message.state is VbucketState.ACTIVE,
    "before the source knows": lambda message: (
        isinstance(message, Response) and message.code == 0x45 and message.opaque > 10
    ),
}


class Writer:
    """Writes until it is refused; what was acknowledged is on the source's disk."""

    def __init__(self, port: int) -> None:
        self.acknowledged: dict[bytes, bytes] = {}
        self._client = Client(port)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def fill(self) -> None:
        """Write so much that a backfill takes a while."""
        requests = [Set(key=b"k%d" % i, value=b"v%d" % i, vbucket=VBUCKET) for i in range(WRITTEN_BEFORE)]
        self._client.send(*requests)
        for request in requests:
            assert self._client.reply().status == 0
            self.acknowledged[request.key] = request.value

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        number = 0
        with contextlib.suppress(OSError, EOFError, AssertionError):
            while not self._stop.is_set():
                key, value = b"k%d" % (number % (2 * WRITTEN_BEFORE)), b"w%d" % number
                if self._client.ask(Set(key=key, value=value, vbucket=VBUCKET)).status:
                    return
                self.acknowledged[key] = value
                number += 1

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self._client.close()


def serve(path: Path) -> NodeProcess:
    states = "1" if path.name == "source" else "none"
    return NodeProcess(
        "--port", "0", "--data", str(path), "--vbuckets", "4", "--initial-vbuckets", states, "--ack", "disk",
    )  # fmt: skip


def state(served: NodeProcess) -> VbucketState | None:
    with Client(served.port) as client:
        reply = client.ask(GetVbucket(vbucket=VBUCKET))
        return None if reply.status else VbucketState(int.from_bytes(reply.body[-4:], "big"))


def set_state(served: NodeProcess, wanted: VbucketState) -> None:
    with Client(served.port) as client:
        assert client.ask(SetVbucket(vbucket=VBUCKET, state=wanted)).status == 0


def check(served: NodeProcess, acknowledged: dict[bytes, bytes]) -> None:
    """Everything that was acknowledged is there, or something newer that was on its way when its writer was cut off."""
    with Client(served.port) as client:
        client.send(*(Get(key=key, vbucket=VBUCKET) for key in acknowledged))
        for key, value in acknowledged.items():
            reply = client.reply()
            assert reply.status == 0, key
            found = reply.body[4:]
            assert _age(found) >= _age(value), key


def _age(value: bytes) -> tuple[bytes, int]:
    """Values of the first round are older than all of the second, which are numbered."""
    return value[:1], int(value[1:]) if value[:1] == b"w" else 0


@contextlib.contextmanager
def killed_at(moment: str, victim: NodeProcess, relay_ports: tuple[int, int]) -> Iterator[threading.Event]:
    """A takeover in which the victim is killed at this moment."""
    killed = threading.Event()

    def look(message: Message) -> None:
        if not killed.is_set() and MOMENTS[moment](message):
            victim.process.kill()
            victim.process.wait()
            killed.set()

    with Relay(*relay_ports, connect(b"mover", TAKEOVER | ACK | LIST, vbuckets=(VBUCKET,)), look) as relay:
        wait_until(killed.is_set, f"the moment {moment}")
        yield killed
        wait_until(lambda: relay.ended, "the relay has noticed")


@pytest.mark.parametrize(
    ("victim", "moment"),
    [
        ("source", "before it is active"),
        ("destination", "before it is active"),
        ("source", "in the backfill"),
        ("destination", "in the backfill"),
        ("source", "before the source knows"),
        ("destination", "before the source knows"),
    ],
)
def test_never_two_active_and_nothing_lost(victim: str, moment: str, tmp_path: Path) -> None:
    paths = {name: tmp_path / name for name in ("source", "destination")}
    with contextlib.ExitStack() as stack:
        nodes = {name: stack.enter_context(serve(path)) for name, path in paths.items()}
        writer = Writer(nodes["source"].port)
        writer.fill()
        writer.start()
        ports = nodes["source"].port, nodes["destination"].port
        with killed_at(moment, nodes[victim], ports):
            pass
        nodes[victim] = stack.enter_context(serve(paths[victim]))
        states = {name: state(node) for name, node in nodes.items()}
        assert list(states.values()).count(VbucketState.ACTIVE) <= 1, states
        if states["destination"] is VbucketState.ACTIVE:
            owner = "destination"
        else:  # it was asked and is not active: so the source may be, and the destination stays inactive
            owner = "source"
            if states["destination"] is not None:
                set_state(nodes["destination"], VbucketState.DEAD)
            set_state(nodes["source"], VbucketState.ACTIVE)
        writer.stop()
        check(nodes[owner], writer.acknowledged)


def test_an_undisturbed_takeover_loses_nothing(tmp_path: Path) -> None:
    with serve(tmp_path / "source") as source, serve(tmp_path / "destination") as destination:
        writer = Writer(source.port)
        writer.fill()
        writer.start()
        with Relay(source.port, destination.port, connect(b"m", TAKEOVER | ACK | LIST, vbuckets=(VBUCKET,))) as relay:
            wait_until(lambda: relay.ended, "the source closes when it is done")
        writer.stop()
        assert (state(source), state(destination)) == (VbucketState.DEAD, VbucketState.ACTIVE)
        destination.process.kill()
        destination.process.wait()
        with serve(tmp_path / "destination") as again:  # everything was on its disk before it answered
            assert state(again) is VbucketState.ACTIVE
            check(again, writer.acknowledged)
