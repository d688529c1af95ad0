"""Addresses, passwords and vbuckets, as commands are given them."""

import socket

import pytest
from click.testing import CliRunner

from tests.support.command_runner import Run
from tests.support.terminal import Terminal
from upriver.cli import main, parameters
from upriver.model import Snapshot, StreamPosition
from upriver.node import EmbeddedNode


def assert_one_line(stderr: str, *words: str) -> None:
    assert stderr.count("\n") == 1, stderr
    assert stderr.startswith("upriver ")
    assert "Traceback" not in stderr
    for word in words:
        assert word in stderr


@pytest.mark.parametrize(
    "command",
    [
        ("get", "k"), ("set", "k", "v"), ("delete", "k"), ("dump",), ("load", "--sample", "1"), ("stats",),
        ("tail",), ("failover-log",),
        ("rollback-check", "--at", "0:1:2"),
        ("diff", "127.0.0.1:1"), ("vbucket", "list"), ("vbucket", "set", "0", "dead"),
    ],
)  # fmt: skip
def test_nothing_listens_at_the_address(command: tuple[str, ...]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: no other program can listen there
        result = CliRunner().invoke(main, [*command, f"127.0.0.1:{taken.getsockname()[1]}"], prog_name="upriver")
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert_one_line(result.stderr, "cannot connect")


@pytest.mark.parametrize("address", ["no host", "host:port", "http://host", "upriver://host?tls=perhaps"])
def test_no_address(run: Run, address: str) -> None:
    for command in (("get", "k"), ("load", "--sample", "1")):
        result = run(*command, address)
        assert result.exit_code == 2
        assert_one_line(result.stderr, "address")


def test_the_variable_names_the_node(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("set", "k", "v").exit_code == 0
    assert run("load", "--sample", "1").exit_code == 0
    monkeypatch.setenv("UPRIVER_ADDRESS", "127.0.0.1:1")
    assert run("get", "k").exit_code == 1


def test_passwords(guarded_node: EmbeddedNode, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(address: str) -> tuple[int, str]:
        result = CliRunner().invoke(main, ["set", "k", "v", address], prog_name="upriver")
        return result.exit_code, result.stderr

    url = f"upriver://me@{guarded_node.address}"
    monkeypatch.setenv("UPRIVER_PASSWORD", "secret")
    assert run(url) == (0, "")
    monkeypatch.setenv("UPRIVER_PASSWORD", "wrong")
    code, stderr = run(url)
    assert code == 1
    assert_one_line(stderr, "rejects the user 'me' or the password")
    monkeypatch.delenv("UPRIVER_PASSWORD")
    code, stderr = run(url)
    assert code == 2
    assert_one_line(stderr, "no password for 'me'")
    code, stderr = run(guarded_node.address)
    assert code == 1
    assert_one_line(stderr, "requires a login")
    monkeypatch.setattr(parameters, "can_prompt", lambda: True)
    result = CliRunner().invoke(main, ["get", "k", url], input="secret\n", prog_name="upriver")
    assert (result.exit_code, result.stdout) == (0, "v")


def test_a_password_is_asked_for_at_a_terminal(guarded_node: EmbeddedNode) -> None:
    with Terminal("set", "k", "v", f"upriver://me@{guarded_node.address}") as terminal:
        terminal.wait_for(lambda output: b"Password of me" in output)
        terminal.type("secret\n")
        assert terminal.finish() == 0
        assert b"secret" not in terminal.output


@pytest.mark.parametrize("given", ["", "x", "5-", "-5", "9-3", "0-1024", "1,,2"])
def test_no_vbuckets(run: Run, given: str) -> None:
    result = run("dump", "--vbuckets", given)
    assert result.exit_code == 2
    assert_one_line(result.stderr, "--vbuckets")


def test_vbuckets_once_each() -> None:
    assert parameters.VBUCKETS.convert("3,0-2, 1", None, None) == (0, 1, 2, 3)


def test_positions() -> None:
    read = parameters.POSITIONS.convert("7:0123:5, 8:0Xab:9:4:12", None, None)
    assert read == {7: StreamPosition.at(123, 5), 8: StreamPosition(0xAB, 9, Snapshot(4, 12))}


@pytest.mark.parametrize("given", ["", "7:1", "7:x:1", "7:99999999999999999999:5", "7:1:5:6:7", "7:1:5:4", "7:1:-5"])
def test_no_positions(run: Run, given: str) -> None:
    for command in (("tail", "--from"), ("rollback-check", "--at")):
        result = run(*command, given)
        assert result.exit_code == 2
        assert_one_line(result.stderr, "7" if given else "position")


def test_positions_of_an_unknown_vbucket(run: Run) -> None:
    result = run("tail", "--until-now", "--from", "900:1:5")
    assert result.exit_code == 1
    assert_one_line(result.stderr, "vbucket 900 does not exist")
