"""``upriver get``."""

import json

from tests.support.command_runner import Run
from tests.support.terminal import Terminal, piped
from upriver.node import EmbeddedNode


def test_the_value_byte_for_byte(run: Run) -> None:
    data = bytes(range(256))
    assert run("set", "all", "-", given=data).exit_code == 0
    result = run("get", "all")
    assert (result.exit_code, result.stdout_bytes, result.stderr) == (0, data, "")


def test_as_json(run: Run) -> None:
    run("set", "fruit", "Äpfel", "--flags", "7")
    shown = json.loads(run("get", "fruit", "--json").stdout)
    assert shown.pop("cas") > 0
    assert shown == {"key": "fruit", "value": "Äpfel", "flags": 7}
    run("set", "fruit", "-", given=b"\xff\x00")
    assert json.loads(run("get", "--json", "fruit").stdout)["value_base64"] == "/wA="


def test_a_key_that_is_not_there(run: Run) -> None:
    result = run("get", "nothing")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "upriver get: no such key: 'nothing'\n"


def test_in_a_pipe_and_at_a_terminal(node: EmbeddedNode) -> None:
    assert piped("set", "fruit", "apple", node.address).returncode == 0
    done = piped("get", "fruit", node.address)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"apple", b"")
    with Terminal("get", "fruit", UPRIVER_ADDRESS=node.address) as terminal:
        assert terminal.finish() == 0
        assert terminal.output == b"apple\r\n"
