"""``upriver run``: pipelines from a terminal and from a file, killed and stopped."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from tests.support.command_runner import Run
from tests.support.depth import DEEP
from tests.support.node_clusters import push_map
from upriver.client import SyncKvClient
from upriver.node import EmbeddedNode, start
from upriver.pipelines.core.registry import PIPELINES

COMMAND = [sys.executable, "-m", "upriver", "run"]


@pytest.fixture
def other() -> Iterator[EmbeddedNode]:
    """Where things go."""
    with start(vbuckets=8) as node:
        yield node


def test_the_help_lists_every_pipeline_and_each_has_its_options(run: Run) -> None:
    listed = run("run", "--help").output
    assert all(name in listed for name in PIPELINES)
    shown = run("run", "replicate", "--help").output
    for option in ("--from", "--to", "--rename", "--key-prefix", "--both", "--no-fail-on-data-loss"):
        assert option in shown
    for option in ("--checkpoint", "--once", "--for TIME", "--forever", "--master"):
        assert option in shown


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "give a pipeline, or a file with -f"),
        (("replikate",), "replikate"),
        (("replicate",), "option to = '': give the cluster"),
        (("replicate", "--to", "nowhere:x"), "option to = 'nowhere:x': it must be a valid address: invalid port"),
        (("replicate", "--to", "a:1", "--once", "--forever"), "exclude each other"),
        (("replicate", "--to", "a:1", "--for", "soon"), "a time such as"),
        (
            ("transition", "--to", "a:1", "--parallel", "0"),
            "option parallel = '0': it must be a whole number from 1",
        ),
        (("-f", "no such file.toml"), "no such file.toml: No such file"),
    ],
)
def test_what_makes_no_sense_is_one_line(run: Run, arguments: tuple[str, ...], complaint: str) -> None:
    result = run("run", *arguments)
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('to = "a:1"', 'pipeline = "NAME" is missing'),
        ('pipeline = "nothing"', "unknown pipeline"),
        ('pipeline = "replicate"\nto = "a:1"\nkey_prefiks = "x"', "did you mean key-prefix"),
        ("pipeline = ", "file.toml"),
        ('pipeline = "mirror"\nonce = "perhaps"', "for '--once': 'perhaps' is not a valid boolean"),
        ('pipeline = "mirror"\nfor = [1]', "for '--for': [1] must be a time such as"),
        ('pipeline = "replicate"\nto = "a:1"\nfor = "soon"', "a time such as"),
    ],
)
def test_a_file_that_makes_no_sense_is_one_line(run: Run, text: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "file.toml").write_text(text)
    result = run("run", "-f", str(tmp_path / "file.toml"))
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_file_says_everything(run: Run, node: EmbeddedNode, tmp_path: Path) -> None:
    with start(vbuckets=8, initial_vbuckets="none") as destination:
        push_map([node, destination], [0] * 8, rev=1)
        with SyncKvClient(node.address) as kv:
            kv.set_many({f"k{n}": b"v" for n in range(100)})
        (tmp_path / "move.toml").write_text(
            f'pipeline = "transition"\nfrom = "{node.address}"\nto = "{destination.address}"\nvbuckets = [0, 1, 2]\n'
            f'checkpoint = "{tmp_path / "state"}"\nparallel = 2\nonce = "false"\nfor = "60s"\n'
        )
        result = run("run", "-f", str(tmp_path / "move.toml"))
        assert result.exit_code == 0, result.stderr
        last = json.loads(result.stdout.splitlines()[-1])
        assert (last["summary"], last["moved"], last["verified"]) == (True, 3, 3)
        refused = run("run", "transition", "--to", node.address, "--from", destination.address,
                      "--checkpoint", str(tmp_path / "state"))  # fmt: skip
        assert refused.exit_code == 1
        assert "it belongs to another pipeline" in refused.stderr


def _line(stream: IO[str] | None, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first line of progress of which this is true."""
    assert stream is not None
    for line in stream:
        said: dict[str, Any] = json.loads(line)
        if condition(said):
            return said
    raise AssertionError("it has ended before that")


@pytest.mark.spark
@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_killed_and_stopped_it_goes_on_from_where_it_was(
    run: Run, node: EmbeddedNode, other: EmbeddedNode, tmp_path: Path
) -> None:
    """With a Spark of its own, which prints nothing: Ctrl-C, and in a deep run ``kill -9`` before; then to the end."""
    pytest.importorskip("pyspark", reason="the spark extra is not installed")
    command = [*COMMAND, "replicate", "--from", node.address, "--to", other.address, "--checkpoint", str(tmp_path)]
    with SyncKvClient(node.address) as kv:
        kv.set_many({f"k{n}": b"first" for n in range(2000)})
    if DEEP:
        with subprocess.Popen(
            [*command, "--max-rows", "100"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as killed:
            _line(killed.stdout, lambda said: said["batches"] > 0)
            os.kill(killed.pid, signal.SIGKILL)
            assert killed.stderr is not None
            assert killed.stderr.read() == ""
    with SyncKvClient(node.address) as kv:
        kv.set_many({f"k{n}": b"second" for n in range(1000, 3000)})
        for n in range(500):
            kv.delete(f"k{n}")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as stopped:
        _line(stopped.stdout, lambda said: said["batches"] > 0 and said["lag_changes"] == 0)
        os.killpg(stopped.pid, signal.SIGINT)  # as a terminal does: all of them hear it
        said = _line(stopped.stdout, lambda said: "summary" in said)
        assert (said["interrupted"], said["restarts"]) == (True, 0)
        assert stopped.wait(60) == 0
        assert stopped.stderr is not None
        assert stopped.stderr.read() == ""
    compared = run("diff", node.address, other.address)
    assert compared.exit_code == 0, compared.output
