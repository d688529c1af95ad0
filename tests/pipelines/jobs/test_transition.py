"""Vbuckets move to another node and back, verified, through interruptions of every kind."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from tests.support.node_clusters import push_map
from tests.support.node_contents import active, held
from upriver.client import SyncKvClient
from upriver.errors import CheckpointError, OptionError, PipelineFailed
from upriver.model import VbucketState
from upriver.node import EmbeddedNode, start
from upriver.pipelines import RunProgress, run
from upriver.pipelines.core.directory import RunDirectory
from upriver.pipelines.jobs.transition import Transition, TransitionOptions, difference, read_record, write_record

Nodes = tuple[EmbeddedNode, EmbeddedNode]
VBUCKETS = 8


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    """One with everything, one with nothing yet."""
    with start(vbuckets=VBUCKETS) as first, start(vbuckets=VBUCKETS, initial_vbuckets="none") as second:
        push_map([first, second], [0] * VBUCKETS, rev=1)
        with SyncKvClient(first.address) as kv:
            kv.set_many({f"k{n}": b"v%d" % n for n in range(500)})
            for n in range(0, 100, 7):
                kv.delete(f"k{n}")
        yield first, second


def job(nodes: Nodes, **options: object) -> Transition:
    return Transition.of({"from": nodes[0].address, "to": nodes[1].address, **options})


def contents(node: EmbeddedNode) -> dict[str, bytes]:
    return held(node.address, [f"k{n}" for n in range(600)])


def test_vbuckets_move_verified_and_come_back(nodes: Nodes, tmp_path: Path) -> None:
    first, second = nodes
    before = contents(first)
    seen: list[RunProgress] = []
    half = "0-3"
    summary = run(job(nodes, vbuckets=half), checkpoint=tmp_path, on_progress=seen.append)
    assert (active(first.address), active(second.address)) == ([4, 5, 6, 7], [0, 1, 2, 3])
    counts = summary.last.counts
    assert (counts["vbuckets"], counts["moved"], counts["verified"]) == (4, 4, 4)
    assert any(0 < progress.counts["moved"] < 4 for progress in seen)
    assert contents(first) == before
    again = run(job(nodes, vbuckets=half), checkpoint=tmp_path)
    assert again.last.counts["moved"] == 0
    rest = run(job(nodes), checkpoint=tmp_path)  # all that the source still has
    assert rest.last.counts["moved"] == 4
    assert active(second.address) == list(range(VBUCKETS))
    with SyncKvClient(second.address) as kv:
        kv.set("k599", b"written there")
    undone = run(job(nodes, undo=True), checkpoint=tmp_path)
    assert (undone.last.counts["undone"], undone.last.counts["verified"]) == (VBUCKETS, VBUCKETS)
    assert (active(first.address), active(second.address)) == (list(range(VBUCKETS)), [])
    assert contents(first) == before | {"k599": b"written there"}
    assert not list(tmp_path.glob("*.arrow"))


def test_what_was_moved_back_by_somebody_else_moves_again(nodes: Nodes, tmp_path: Path) -> None:
    first, second = nodes
    run(job(nodes, vbuckets="0-1"), checkpoint=tmp_path / "there")
    run(job((second, first), vbuckets="0-1"), checkpoint=tmp_path / "back")
    assert active(second.address) == []
    again = run(job(nodes, vbuckets="0-1"), checkpoint=tmp_path / "there")
    assert (again.last.counts["moved"], again.last.counts["verified"]) == (2, 2)
    assert active(second.address) == [0, 1]


def test_writes_go_on_while_vbuckets_move(nodes: Nodes, tmp_path: Path) -> None:
    stop = threading.Event()
    written: dict[str, bytes] = {}

    def write() -> None:
        with SyncKvClient(nodes[0].address, timeout_s=60) as kv:
            for n in range(500, 100_000):
                if stop.is_set():
                    return
                key = f"k{n % 600}"
                kv.set(key, b"%d" % n)
                written[key] = b"%d" % n

    expected = contents(nodes[0])
    writer = threading.Thread(target=write)
    writer.start()
    try:
        run(job(nodes), checkpoint=tmp_path)
    finally:
        stop.set()
        writer.join()
    assert contents(nodes[1]) == expected | written


def test_one_that_was_killed_goes_on(nodes: Nodes, tmp_path: Path) -> None:
    before = contents(nodes[0])
    command = [sys.executable, "-m", "upriver", "run", "transition", "--from", nodes[0].address]
    command += ["--to", nodes[1].address, "--checkpoint", str(tmp_path), "--parallel", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.readline()  # the first step is told
        os.kill(process.pid, signal.SIGKILL)
    summary = run(job(nodes), checkpoint=tmp_path)
    assert summary.last.counts["verified"] > 0
    assert (active(nodes[0].address), active(nodes[1].address)) == ([], list(range(VBUCKETS)))
    assert contents(nodes[1]) == before


def test_stopped_it_can_be_gone_on_with_or_undone(nodes: Nodes, tmp_path: Path) -> None:
    stop = threading.Event()
    summary = run(
        job(nodes, parallel=1), checkpoint=tmp_path, stop=stop,
        on_progress=lambda progress: stop.set() if progress.counts["moved"] >= 2 else None,
    )  # fmt: skip
    assert 2 <= summary.last.counts["moved"] < VBUCKETS
    run(job(nodes, undo=True), checkpoint=tmp_path)
    assert (active(nodes[0].address), active(nodes[1].address)) == (list(range(VBUCKETS)), [])


def test_a_destination_that_is_gone_is_told_with_its_vbucket(nodes: Nodes, tmp_path: Path) -> None:
    nodes[1].close()
    with pytest.raises(Exception, match=r"127\.0\.0\.1"):
        run(job(nodes, step_patience="500ms"), checkpoint=tmp_path)
    assert active(nodes[0].address) == list(range(VBUCKETS))


def test_a_vbucket_without_an_owner_is_reported(nodes: Nodes, tmp_path: Path) -> None:
    nodes[0].call(nodes[0].bucket.vbucket(3).set_state, VbucketState.DEAD)
    with pytest.raises(PipelineFailed, match="vbucket 3"):
        run(job(nodes, vbuckets="3"), checkpoint=tmp_path)


def noted(*rows: tuple[bytes, int, int, int], high: int | None = None) -> pa.Table:
    keys, seqnos, revisions, events = zip(*rows, strict=True)
    table = pa.table({"key": keys, "seqno": seqnos, "rev_seqno": revisions, "cas": revisions, "event": events})
    return table if high is None else table.replace_schema_metadata({"high": str(high)})


@pytest.mark.parametrize(
    ("after", "complaint"),
    [
        ([(b"a", 1, 1, 1), (b"b", 2, 1, 1), (b"c", 3, 2, 2)], ""),
        ([(b"b", 2, 1, 1), (b"a", 4, 2, 1), (b"d", 5, 1, 1)], ""),
        ([(b"a", 1, 1, 1), (b"c", 3, 2, 2)], "key b'b', change 2, is missing at the destination"),
        ([(b"a", 1, 9, 1), (b"b", 2, 1, 1)], "another version than change 1"),
        ([(b"a", 1, 1, 1), (b"b", 2, 1, 1), (b"x", 3, 1, 1)], "key b'x', change 3, did not exist at the source"),
    ],
)
def test_what_did_not_arrive_is_found(after: list[tuple[bytes, int, int, int]], complaint: str) -> None:
    before = noted((b"a", 1, 1, 1), (b"b", 2, 1, 1), (b"c", 3, 2, 2), high=3)
    found = difference(before, noted(*after))
    assert complaint in found
    assert bool(found) == bool(complaint)


def test_a_record_is_on_disk_when_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def watched_fsync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    table = noted((b"a", 1, 1, 1), high=7)
    write_record(tmp_path / "r.arrow", table)
    assert len(synced) == 2
    assert synced[1] == str(tmp_path)
    assert read_record(tmp_path / "r.arrow").equals(table, check_metadata=True)
    assert [path.name for path in tmp_path.iterdir()] == ["r.arrow"]


@pytest.mark.parametrize("kept", [0, 10, -1])
def test_a_damaged_record_is_a_checkpoint_error_that_names_the_file(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "vbucket-3-to-b-1.arrow"
    write_record(path, noted((b"a", 1, 1, 1), high=7))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(
        CheckpointError, match=r"vbucket-3-to-b-1\.arrow: damaged record .*Delete the file and run again"
    ):
        read_record(path)


def test_a_record_that_cannot_be_read_or_written_names_the_file(tmp_path: Path) -> None:
    for use in (lambda path: write_record(path, noted((b"a", 1, 1, 1))), read_record):
        with pytest.raises(CheckpointError, match=r"no folder/r\.arrow: No such file"):
            use(tmp_path / "no folder" / "r.arrow")


def test_the_record_of_a_completed_move_is_gone_before_the_state_says_so(nodes: Nodes, tmp_path: Path) -> None:
    """A crash in between must not leave a record that a later move of the same vbucket would compare with."""
    left: list[list[Path]] = []

    class Watched(RunDirectory):
        def write(self, name: str, content: object) -> None:
            super().write(name, content)
            if name == "transition.json":
                left.append(list(self.path.glob("*.arrow")))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("upriver.pipelines.jobs.transition.RunDirectory", Watched)
        run(job(nodes, vbuckets="0-1"), checkpoint=tmp_path)
    assert [len(records) for records in left] == [2, 0]


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(OptionError, match="give the node"):
        TransitionOptions.read({"from": "a:1"})
    with pytest.raises(OptionError, match="the source itself"):
        TransitionOptions.read({"from": "a:1", "to": "a:1"})
