"""``upriver run mirror`` beside a writer, while driver, Python workers and nodes are killed and vbuckets move.

All of them are real processes. At the end of each round the writer pauses, and every reader must find in the table what
the nodes hold.
"""

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="the spark extra is not installed")

from tests.support.depth import by_depth
from tests.support.mirror_comparison import mirror_differences
from tests.support.mirror_process import PATIENCE_S, MirrorProcess
from tests.support.node_contents import active
from tests.support.restartable_node import RestartableNode
from tests.support.sample_tables import assert_all_see
from tests.support.spark_processes import settings_variable
from tests.support.spark_tables import contents_at, kill_workers
from tests.support.steady_writer import SteadyWriter
from upriver.tables import TableStorage, read

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1800)]
VBUCKETS = 16
KEYS = 1500
CHANGES_PER_S = 400


class World:
    """Two nodes, a writer, a mirror, and what happens to them."""

    def __init__(self, directory: Path, seed: int, *arguments: str) -> None:
        self._random = random.Random(seed)
        self.nodes = [
            RestartableNode(directory / name, "memory", "dcp", VBUCKETS, "--initial-vbuckets", initial)
            for name, initial in (("first", "all"), ("second", "none"))
        ]
        self.source = ",".join(node.address for node in self.nodes)
        self.table = directory / "table"
        self.writer = SteadyWriter(self.source, KEYS, CHANGES_PER_S, seed)
        given = ["--from", self.source, "--to", str(self.table), "--master", "local[2]", "--max-rows", "500"]
        self.mirror = MirrorProcess(directory / "run", *given, *arguments, **settings_variable())
        self._stack = ExitStack()

    def __enter__(self) -> "World":
        for node in self.nodes:
            self._stack.callback(node.kill)
        self._stack.enter_context(self.mirror)
        self._stack.enter_context(self.writer)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # What happens

    def kill_driver(self) -> None:
        """Kill the driver, sometimes with its Spark, and start it again."""
        self.mirror.kill(only_driver=self._random.random() < 0.5)
        self.mirror.start()

    def kill_python_workers(self) -> None:
        """Kill the Python workers of the driver's Spark."""
        self.mirror.wait(lambda: kill_workers(self.mirror.pid), "a Python worker")

    def kill_a_node(self) -> None:
        """Kill a node: it loses what was not on disk."""
        node = self._random.choice(self.nodes)
        node.kill()
        node.start()

    def move(self) -> None:
        """Move some of the vbuckets of a node to the other one."""
        subprocess.run(self._move(), check=True, capture_output=True)

    def kill_a_node_during_a_move(self) -> None:
        """Kill a node while vbuckets move, and finish the move afterwards."""
        command = self._move()
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as moving:
            self.some_changes(400)
            self.kill_a_node()
            if moving.wait(PATIENCE_S):
                subprocess.run(command, check=True, capture_output=True)

    def _move(self) -> list[str]:
        """The command for a move: to the second node, unless it has most of the vbuckets."""
        held = [active(node.address) for node in self.nodes]
        number = 0 if len(held[0]) > VBUCKETS // 3 else 1
        chosen = self._random.sample(held[number], self._random.randint(1, len(held[number])))
        listed = ",".join(map(str, sorted(chosen)))
        source, destination = self.nodes[number].address, self.nodes[1 - number].address
        return [sys.executable, "-m", "upriver", "move", listed, "--to", destination, source]

    def some_changes(self, most: int = 1500) -> None:
        """Let the writer go on for a random number of changes."""
        until = self.writer.changes + self._random.randint(1, most)
        self.mirror.wait(lambda: self.writer.changes >= until or self.writer.failure is not None, "changes")

    def a_batch(self) -> None:
        """Wait for a completed batch."""
        before = self.mirror.batches
        self.mirror.wait(lambda: self.mirror.batches > before, "a batch")

    # What must hold

    def settle(self) -> None:
        """Pause the writer until the table agrees with the nodes, as every reader sees it."""
        self.writer.pause()
        self.mirror.wait(self._agrees, "table and nodes to agree")
        self._check()
        self.writer.resume()

    def end(self) -> None:
        """Stop the writer and then the mirror, when the table agrees with the nodes."""
        self.writer.pause()
        self.mirror.wait(self._agrees, "table and nodes to agree")
        self.mirror.stop()
        self._check()

    def _agrees(self) -> bool:
        return (self.table / "_delta_log").exists() and mirror_differences(self.table, self.source) == []

    def _check(self) -> None:
        held = contents_at(self.source)
        assert len(held) > min(self.writer.changes, KEYS) // 4, "too little was written to compare anything"
        expected = [(int(key[1:]), json.loads(value)["n"]) for key, value in held.items()]
        assert_all_see(TableStorage.of(self.table), expected)
        keys = read(self.table, ["_key"]).column("_key").to_pylist()
        assert len(keys) == len(set(keys))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    with ExitStack() as stack:
        yield lambda seed, *arguments: stack.enter_context(World(tmp_path, seed, *arguments))


@pytest.mark.heavy
def test_a_crash_of_each_process_and_a_move(world: Callable[..., World]) -> None:
    mirrored = world(1)
    mirrored.a_batch()
    mirrored.kill_python_workers()
    mirrored.some_changes(300)
    mirrored.kill_driver()
    mirrored.move()
    mirrored.kill_a_node()
    mirrored.a_batch()
    mirrored.end()


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("--deletion-vectors", "off")], ids=["vectors", "copies"])
@pytest.mark.parametrize("seed", range(3))
def test_crashes_at_random_moments(world: Callable[..., World], seed: int, arguments: tuple[str, ...]) -> None:
    mirrored = world(seed, *arguments)
    events = [
        mirrored.kill_driver,
        mirrored.kill_python_workers,
        mirrored.kill_a_node,
        mirrored.move,
        mirrored.kill_a_node_during_a_move,
        mirrored.a_batch,
    ]
    choose = random.Random(seed)
    for _ in range(by_depth(quick=2, deep=5)):
        for _ in range(choose.randint(2, 4)):
            mirrored.some_changes()
            choose.choice(events)()
        mirrored.settle()
    mirrored.end()
    mirrored.mirror.start()  # a new start changes nothing
    addresses = [node.address for node in mirrored.nodes]
    mirrored.mirror.wait(lambda: mirrored.mirror.has_caught_up(*addresses), "a new start")
    mirrored.end()
