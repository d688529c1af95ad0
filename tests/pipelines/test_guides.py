"""The commands of the guides, carried out as written, except for addresses, paths and durations.

For each new block of commands, add here what it needs and what it must have done.
"""

import itertools
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import trustme
from click.testing import CliRunner

from tests.support.cache_servers import CacheServer, free_port
from tests.support.depth import by_depth
from tests.support.mirrored_tables import mirror_now
from tests.support.page_snippets import PAGES, ROOT, sessions
from tests.support.search_servers import FakeOpenSearch, FakeSolr, served
from upriver.cli import main
from upriver.client import SyncKvClient
from upriver.node import EmbeddedNode, start

pytest.importorskip("deltalake", reason="the pipelines extra is not installed")

Session = list[list[str]]


def needs_spark(shown: Session) -> bool:
    """Whether one of the commands runs a pipeline on Spark."""
    return any(command[0] == "run" and command[1] != "transition" for command in shown)


SESSIONS = [
    pytest.param(
        shown,
        id=f"{page.stem}-{' '.join(shown[0])}"[:60],
        marks=[pytest.mark.spark, pytest.mark.heavy] if needs_spark(shown) else [],
    )
    for page in PAGES
    if page.name != "README.md"  # whose commands tests/test_readme.py types
    for shown in sessions(page)
]
PASSWORD = "correct horse"
#: How many vbuckets a node has here; the guides move the lower half.
VBUCKETS = by_depth(quick=64, deep=1024)
MOVED = VBUCKETS // 2


class Typist:
    """Types commands into a directory of its own; what the page calls by one name has another one here."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.called: dict[str, str] = {}

    def words(self, shown: list[str]) -> list[str]:
        """The command with the names that hold here; it ends with what there is now."""
        words = []
        for word in shown:
            word = re.sub(r"\b0-511\b", f"0-{MOVED - 1}", word)
            for name, here in self.called.items():
                word = word.replace(name, here)
            words.append(word)
        if shown[0] == "run" and shown[1] != "transition":
            typed = re.sub(r"\0(--forever|--once|--for\0\d+s)\b", "", "\0".join(words)).split("\0")
            words = [*typed, "--once"]
        return words

    def type(self, shown: list[str]) -> str:
        """Carry it out; what it prints."""
        words = self.words(shown)
        if shown[:2] == ["user", "add"]:
            words.append("--password-stdin")  # otherwise it would prompt
        result = CliRunner().invoke(main, words, input=PASSWORD, prog_name="upriver")
        assert result.exit_code == 0, f"{shown}: {result.output}"
        return result.output

    @contextmanager
    def started(self, shown: list[str], ready: str = "") -> Iterator[subprocess.Popen[str]]:
        """A command that goes on until it is interrupted; it is begun when it has said that it is ready."""
        command = [sys.executable, "-m", "upriver", *self.words(shown)]
        with subprocess.Popen(command, cwd=self.directory, text=True, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                if ready:
                    assert ready in process.stdout.readline()
                yield process
                process.send_signal(signal.SIGINT)
                assert process.wait(60) in (0, 128 + signal.SIGINT)
            finally:
                process.kill()


@pytest.fixture
def typist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Typist:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("UPRIVER_PASSWORD", PASSWORD)
    return Typist(tmp_path)


@contextmanager
def two_nodes(typist: Typist, *, second: str = "all") -> Iterator[tuple[EmbeddedNode, EmbeddedNode]]:
    """The first one with documents of a shop; what the second one has of vbuckets is said."""
    with start(vbuckets=VBUCKETS) as first, start(vbuckets=VBUCKETS, initial_vbuckets=second) as other:
        with SyncKvClient(first.address) as kv:
            documents = {f"user:{n}": {"name": f"person {n}"} for n in range(20)}
            documents |= {f"item:{n}": {"name": "red shoes" if n == 7 else "a hat"} for n in range(20)}
            kv.set_many({key: json.dumps(value).encode() for key, value in documents.items()})
        typist.called |= {"127.0.0.1:11210": first.address, "127.0.0.1:11211": other.address}
        yield first, other


def contents(address: str) -> dict[bytes, bytes]:
    lines = CliRunner().invoke(main, ["dump", address], prog_name="upriver").output.splitlines()
    return {said["key"].encode(): said["value"] for said in map(json.loads, lines)}


def replicate(typist: Typist, shown: Session) -> None:
    with two_nodes(typist) as (first, other):
        for command in shown:
            typist.type(command)
        assert {key for key in contents(other.address) if key.startswith(b"item:")}
        if len(shown) == 1:
            assert contents(other.address) == contents(first.address)
        else:  # with a rename, then both ways
            assert b"customer:3" in contents(first.address)


def observe(typist: Typist, shown: Session) -> None:
    with two_nodes(typist):
        for command in shown:
            typist.type(command)
    assert list(Path("windows").iterdir())
    assert Path("changes.png").read_bytes().startswith(b"\x89PNG")


def transition(typist: Typist, shown: Session) -> None:
    there, back = shown
    with two_nodes(typist, second="none") as (first, other):
        before = contents(first.address)
        typist.type(there)
        assert len(list(other.bucket)) == MOVED
        typist.type(back)
        assert contents(first.address) == before


def mirror(typist: Typist, shown: Session) -> None:
    with two_nodes(typist):
        printed = [typist.type(command) for command in shown]
    assert all("no differences" in said for said in printed[2:]), printed


def table(typist: Typist, shown: Session) -> None:
    with two_nodes(typist) as (first, _):
        mirror_now(first.address, "tables/shop")
        printed = [typist.type(command) for command in shown]
    assert "40 live" in printed[0]


def index(typist: Typist, shown: Session) -> None:
    with two_nodes(typist), served(FakeOpenSearch) as opensearch, served(FakeSolr) as solr:
        typist.called |= {"127.0.0.1:9200": f"127.0.0.1:{opensearch.port}", "127.0.0.1:8983": f"127.0.0.1:{solr.port}"}
        printed = [typist.type(command) for command in shown]
        assert "item:7" in printed[1]
        assert len(opensearch.documents) == 40
        assert len(solr.documents) == 40 + 1  # and how far it is


def invalidate(typist: Typist, shown: Session) -> None:
    with two_nodes(typist), ExitStack() as stack:
        servers = [CacheServer(program, typist.directory) for program in ("memcached", "redis-server")]
        for server in servers:
            stack.callback(server.stop)
        typist.called |= {"memcached://127.0.0.1:11211": servers[0].url, "redis://127.0.0.1:6379/0": servers[1].url}
        typist.called = dict(sorted(typist.called.items(), key=lambda each: -len(each[0])))
        printed = [typist.type(command) for command in shown]
        assert '"refreshed": 40' in printed[1]


def serve(typist: Typist, shown: Session) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    Path("node.pem").write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
    Path("node.key").write_bytes(issued.private_key_pem.bytes())
    typist.called |= {"/var/lib/upriver": "data", "0.0.0.0": "127.0.0.1", "9100": str(free_port())}
    *before, command = shown
    for each in before:
        typist.type(each)
    with typist.started([*command, "--port", "0"], "is served on 127.0.0.1:"):
        pass


def move(typist: Typist, shown: Session) -> None:
    with two_nodes(typist, second="none") as (first, other):
        typist.called |= {"10.0.0.1:11210": first.address, "10.0.0.2:11210": other.address}
        for command in shown:
            typist.type(command)
        assert len(list(other.bucket)) == MOVED


def tail(typist: Typist, shown: Session) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path("ca.pem")
    issued.private_key_and_cert_chain_pem.write_to_path("node.pem")
    typist.type(["user", "add", "--users", "users.json", "reader", "--roles", "read,write,stream"])
    tls = {"tls_cert": Path("node.pem"), "tls_key": Path("node.pem"), "users": Path("users.json")}
    with start(bucket="orders", **tls) as node:
        typist.called |= {"db1.example:11207,db2.example:11207": node.address, "/etc/ca.pem": "ca.pem"}
        address = f"upriver://reader:{PASSWORD.replace(' ', '%20')}@{node.address}/orders?tls=on&ca=ca.pem"
        with typist.started(shown[0]) as process, writing(address):
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["key"].startswith("order:")


@contextmanager
def writing(address: str) -> Iterator[None]:
    """Somebody writes meanwhile: what is followed from now on begins with what is written after it has connected."""
    stop = threading.Event()

    def write() -> None:
        with SyncKvClient(address) as kv:
            for number in itertools.count():
                kv.set(f"order:{number}", b"{}")
                if stop.wait(0.02):
                    return

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        stop.set()
        writer.join()


def by_itself(typist: Typist, shown: Session) -> None:
    for command in shown:
        typist.type(command)


SCENES: dict[str, Callable[[Typist, Session], None]] = {
    "run replicate": replicate,
    "run observe": observe,
    "run transition": transition,
    "run mirror": mirror,
    "table": table,
    "run index": index,
    "run invalidate": invalidate,
    "explain": by_itself,
    "serve": serve,
    "user": serve,
    "move": move,
    "tail": tail,
}


@pytest.mark.interop
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shown", SESSIONS)
def test_the_commands_of_a_guide_do_what_it_says(
    request: pytest.FixtureRequest, typist: Typist, shown: Session
) -> None:
    if needs_spark(shown):
        request.getfixturevalue("spark")
    name, *rest = shown[0]
    SCENES[f"run {rest[0]}" if name == "run" else name](typist, shown)


def test_the_guides_show_commands() -> None:
    assert len(SESSIONS) >= 10
    assert {page.parent for page in PAGES} == {ROOT, ROOT / "docs"}
