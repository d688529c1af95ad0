"""A consumer that follows the changes ends with exactly the source's contents: the purpose of everything else."""

import random
from pathlib import Path

import pytest

from tests.support.depth import slow_except
from tests.support.engine_cluster import Cluster, random_script
from tests.support.manual_clock import Clock

pytestmark = pytest.mark.usefixtures("small_blocks")

#: Minimal histories, each of which loses or keeps a key if one rule of docs/semantics.md is left out.
#: The events are those of ``Cluster``: set and delete (node, key), connect (follower, node, mode, tries),
#: deliver (follower, count), promote (node, what becomes of the old one), print (node, which start), and so on.
TRACES = {
    "a promotion in mid-snapshot branches at the kept start": """\
set 0 2, connect 1 0 1 9, deliver 1 9, set 0 0, set 0 1, set 0 0, deliver 1 2, promote 1 0, set 1 1, back 0 0""",
    "the same while a consumer looks on": """\
set 0 2, connect 1 0 1 9, deliver 1 9, connect 4 0 1 9, deliver 4 9, set 0 0, set 0 1, deliver 4 9, set 0 0
deliver 4 9, deliver 1 2, promote 1 0, set 1 1, connect 4 1 1 9, deliver 4 9""",
    "a snapshot ends only where the sender is consistent": """\
set 0 1, persist 0, set 0 0, set 0 1, connect 1 0 1 1, deliver 1 2, crash 0, connect 4 1 2 9, deliver 4 2""",
    "the same behind a replica that was filled before": """\
set 0 1, connect 4 0 0 9, deliver 4 9, connect 1 0 0 9, deliver 1 9, cut 4, cut 1, set 0 1, persist 0, set 0 0
set 0 1, connect 1 0 0 9, deliver 1 2, crash 0, connect 4 1 0 9, deliver 4 3""",
    "the first snapshot reaches the high seqno": """\
set 0 1, connect 2 0 2 1, deliver 2 20, delete 0 0, set 0 0, delete 0 0, connect 4 0 0 9, deliver 4 3
promote 2 1, set 2 0, connect 1 2 2 9, deliver 1 2, connect 4 2 2 1, promote 1 0""",
    "a restart inside a received snapshot branches at its start": """\
set 0 0, set 0 2, set 0 0, connect 1 0 1 1, deliver 1 2, persist 1, deliver 1 4, promote 1 1, crash 1""",
    "a rollback to 0 is a reset": """\
set 0 1, connect 4 0 1 1, deliver 4 20, crash 0, set 0 1, connect 4 0 2 1, crash 0""",
    "a rollback is on disk before the new log": """\
set 0 0, persist 0, connect 1 0 0 9, deliver 1 9, persist 1, set 0 1, deliver 1 9, persist 1, cut 1
crash 0, set 0 2, connect 1 0 0 9, crash 1, connect 1 0 0 9""",
    "a copy filled from 0 inherits a purge seqno": """\
set 0 0, connect 4 0 0 9, deliver 4 9, cut 4, delete 0 0, set 0 1, set 0 1, purge 0 0
connect 1 0 0 9, deliver 1 9, promote 1 0, connect 4 1 0 9, deliver 4 9""",
    "the same if the marker prints the first seqno that is sent": """\
print 0 1, set 0 0, connect 4 0 0 9, deliver 4 9, cut 4, delete 0 0, set 0 1, set 0 1, purge 0 0
connect 1 0 0 9, deliver 1 9, promote 1 0, connect 4 1 0 9, deliver 4 9""",
    "a marker that begins before a consistent state makes no mixture consistent": """\
print 0 -1, set 0 0, set 0 1, persist 0, set 0 0, connect 1 0 0 9, deliver 1 9, set 0 2, deliver 1 1
connect 4 1 0 9, deliver 4 3, crash 0, connect 4 0 0 9, deliver 4 9""",
    "a receiver keeps the larger end": """\
set 0 0, set 0 1, set 0 2, set 0 0, connect 1 0 1 9, deliver 1 2, cut 1, set 0 1, connect 1 0 1 9
deliver 1 2, connect 4 0 1 9, deliver 4 9, promote 1 0, connect 4 1 1 9, deliver 4 9""",
    "a range that is cut short is not consistent": """\
set 0 0, set 0 1, set 0 2, connect 5 0 0 9, deliver 5 2, set 0 0, compact 0 0, deliver 5 9""",
    "a flush is noticed by those who were away": """\
set 0 0, connect 1 0 0 9, deliver 1 9, connect 4 0 0 9, deliver 4 9, cut 1, cut 4
flush 0, set 0 1, set 0 1, set 0 1""",
}


@pytest.mark.parametrize("rule", TRACES)
def test_each_rule_stands_against_a_trace(rule: str, quick_disk: Path, clock: Clock) -> None:
    cluster = Cluster(quick_disk, clock)
    for line in TRACES[rule].splitlines():
        for event in line.split(","):
            name, *arguments = event.split()
            cluster.apply((name, *map(int, arguments)))
    cluster.settle()
    cluster.close()


def check_random(seed: int, path: Path, clock: Clock) -> None:
    cluster = Cluster(path, clock)
    script = random_script(random.Random(seed), cluster)
    try:
        cluster.settle()
    except BaseException as error:
        error.add_note(f"seed {seed}, script {script}")
        raise
    finally:
        cluster.close()


@pytest.mark.parametrize("chunk", slow_except(range(4), range(10)))
def test_random_histories_converge(chunk: int, quick_disk: Path, clock: Clock) -> None:
    for seed in range(chunk * 150, chunk * 150 + 150):
        check_random(seed, quick_disk / str(seed), clock)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(20))
def test_many_random_histories_converge(chunk: int, quick_disk: Path, clock: Clock) -> None:
    for seed in range(10_000 + chunk * 1000, 11_000 + chunk * 1000):
        check_random(seed, quick_disk / str(seed), clock)
