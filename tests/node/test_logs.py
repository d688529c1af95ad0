"""Log lines: plain or JSON, with the name of the connection, without what is secret."""

import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.node_process import Client, NodeProcess
from upriver.node import logs
from upriver.node.auth.users import Role, User
from upriver.node.auth.users_file import Users
from upriver.node.embedded import start
from upriver.node.logs import KINDS_MAX, LINES_MAX, LINES_S, RepeatLimit, of_connection
from upriver.wire.dialects.memcached import Get, SaslAuth, Set

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00"


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """What a set-up log writes to; afterwards logging is as it was."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    root.handlers = []
    yield io.StringIO()
    root.handlers, root.level = before, level


def test_plain_lines_name_the_connection(stream: io.StringIO) -> None:
    logs.set_up_logs("info", "plain", stream)
    log = logging.getLogger("upriver.node")
    log.info("ready")
    log.debug("not wanted")
    logs.of_connection(log, "127.0.0.1:5000").warning("closed: %s", "why")
    first, second = stream.getvalue().splitlines()
    assert re.fullmatch(rf"{TIME} INFO    ready", first)
    assert re.fullmatch(rf"{TIME} WARNING 127\.0\.0\.1:5000: closed: why", second)


def test_what_a_peer_says_cannot_make_lines(stream: io.StringIO) -> None:
    logs.set_up_logs("info", "plain", stream)
    logging.getLogger("upriver.node").info("agent %s", "x\r\n2026-01-01 INFO forged")
    assert stream.getvalue().count("\n") == 1


def test_json_lines(stream: io.StringIO) -> None:
    logs.set_up_logs("debug", "json", stream)
    log = logging.getLogger("upriver.node")
    logs.of_connection(log, "[::1]:5000").debug("agent %r", "é\n", extra={"more": 1})
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("it failed")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert re.fullmatch(TIME, first.pop("time"))
    assert first == {"level": "debug", "logger": "upriver.node", "connection": "[::1]:5000", "message": r"agent 'é\n'"}
    assert second["level"] == "error"
    assert second["message"] == "it failed"
    assert second["exception"].endswith("ValueError: broken")
    assert "connection" not in second


def test_an_exception_of_ours_is_shown_whole(stream: io.StringIO) -> None:
    logs.set_up_logs("info", "plain", stream)
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("upriver.node").exception("it failed")
    assert "ValueError: broken" in stream.getvalue()


@pytest.mark.parametrize("form", ["plain", "json"])
def test_a_node_logs_neither_keys_nor_values_nor_passwords(form: str, tmp_path: Path) -> None:
    path = tmp_path / "users.json"
    with Users.edit(path, create=True) as users:
        users.add(User.create("alice", "correct-horse", Role.READ | Role.WRITE))
    with NodeProcess("--port", "0", "--users", str(path), "--log-level", "debug", "--log-format", form) as served:
        with Client(served.port) as client:
            assert client.ask(SaslAuth(mechanism=b"PLAIN", value=b"\0alice\0wrong-battery")).status == 0x20
            assert client.ask(SaslAuth(mechanism=b"PLAIN", value=b"\0alice\0correct-horse")).status == 0
            assert client.ask(Set(key=b"secret-key", value=b"secret-value", vbucket=0)).status == 0
            assert client.ask(Get(key=b"secret-key", vbucket=0)).status == 0
            peer = "{}:{}".format(*client.socket.getsockname())
        with Client(served.port) as client:
            client.socket.sendall(b"secret-garbage" * 10)
            assert client.is_closed()
        _, lines = served.stop()
    for secret in ("wrong-battery", "correct-horse", "secret"):
        assert secret not in lines
    told = [line for line in lines.splitlines() if peer in line]
    assert any("connected" in line for line in told)
    assert any("login of 'alice' failed" in line for line in told)
    if form == "json":
        assert all(json.loads(line)["level"] for line in lines.splitlines())
        assert all(json.loads(line)["connection"] == peer for line in told)


# Messages that peers cause


def test_a_kind_of_message_is_written_a_few_times_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    now = [0.0]
    log = logging.getLogger("upriver.test")
    limit = RepeatLimit(log, lambda: now[0])

    def told() -> list[str]:
        out = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return out

    def send(count: int) -> None:
        for number in range(count):
            of_connection(log, f"peer{number}", limit).warning("closed: %s", number)

    send(LINES_MAX + 5)
    assert told() == [f"closed: {number}" for number in range(LINES_MAX)]
    of_connection(log, "peer", limit).info("closed: %s", "another level is another kind")
    of_connection(log, "peer", limit).debug("connected")
    assert len(told()) == 2
    now[0] = LINES_S - 1
    limit.report()
    assert told() == []
    now[0] = LINES_S
    limit.report()
    assert told() == ["5 more messages were left out, all like this: closed: …"]
    send(LINES_MAX + 1)
    now[0] += LINES_S
    send(1)
    assert told()[-2:] == ["1 more messages were left out, all like this: closed: …", "closed: 0"]
    limit.report(at_end=True)
    assert told() == []
    for number in range(3 * KINDS_MAX):
        of_connection(log, "peer", limit).warning("closed: %s", chr(0x4E00 + number))
    assert len(told()) == KINDS_MAX + LINES_MAX


def test_garbage_fills_no_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with NodeProcess("--port", "0", "--vbuckets", "1", log=log) as node:
        for number in range(300):
            with Client(node.port) as client:
                client.socket.sendall(b"\x00garbage%d" % number)
                assert client.is_closed()
        node.stop()
    lines = [line for line in log.read_text().splitlines() if "WARNING" in line]
    assert len(lines) == LINES_MAX + 1
    assert "280 more messages were left out" in lines[-1]


@pytest.mark.parametrize("sent", [b"get fruit\r\n", b"set k 0 0 1\r\n1\r\n", b"stats\r\n", b"version\r\n", b"g"])
def test_a_client_of_the_text_protocol_is_told(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with start(vbuckets=1) as node:
        with Client(node.port) as client:
            client.socket.sendall(sent)
            answer = b"".join(iter(lambda: client.socket.recv(4096), b""))
            assert answer == b"CLIENT_ERROR the memcached binary protocol is required here\r\n"
        assert [line for line in caplog.messages if "a client of memcached's text protocol?" in line]
        with Client(node.port) as client:  # a client of the binary protocol that lost its place is told nothing
            client.set(b"k", b"v")
            client.socket.sendall(sent)
            assert client.socket.recv(4096) == b""
