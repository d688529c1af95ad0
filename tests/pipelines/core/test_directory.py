"""The directory of a pipeline: whose it is, who is at work in it, and what Spark has logged there."""

import json
from pathlib import Path

import pytest

from upriver.errors import CheckpointError
from upriver.pipelines.core.directory import RunDirectory, identity
from upriver.pipelines.core.registry import find
from upriver.pipelines.jobs.replicate import Replicate
from upriver.spark.offsets import Offset, VbucketOffset


def job(**options: str) -> Replicate:
    return Replicate.of({"from": "a:1", "to": "upriver://ann:secret@b:2/beer", **options})


def test_a_directory_belongs_to_one_pipeline_one_source_and_one_target(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "here") as directory:
        directory.claim(job())
        directory.claim(job(max_rows="7"))  # how large a batch is may change
        for other in (
            job(to="c:3"),
            job(key_prefix="x"),
            job(rename="a=b"),
            Replicate.of({"from": "z:1", "to": "b:2"}),
        ):
            with pytest.raises(CheckpointError, match="belongs to another pipeline"):
                directory.claim(other)
    assert "secret" not in (tmp_path / "here" / "pipeline.json").read_text()


def test_only_one_runner_works_in_a_directory(tmp_path: Path) -> None:
    with RunDirectory(tmp_path), pytest.raises(CheckpointError, match="another process"), RunDirectory(tmp_path):
        pass
    with RunDirectory(tmp_path):
        pass


def test_a_checkpoint_that_no_pipeline_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "offsets").mkdir()
    with RunDirectory(tmp_path) as directory, pytest.raises(CheckpointError, match="not of a pipeline"):
        directory.claim(job())


def test_the_default_is_the_same_for_the_same_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    first = RunDirectory.default(job()).path
    assert first == RunDirectory.default(job(max_rows="9")).path
    assert first != RunDirectory.default(job(key_prefix="x")).path
    assert first.is_relative_to(tmp_path / "upriver")
    assert identity(job())["from"] == "a:1"


@pytest.mark.parametrize("name", ["index", "mirror", "observe"])
def test_a_target_in_another_directory_has_another_checkpoint(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = set()
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        monkeypatch.chdir(tmp_path / place)
        found.add(RunDirectory.default(find(name).of({"from": "a:1"}, to="same")).path)
    assert len(found) == 2
    named = find(name).of({"from": "a:1"}, to=tmp_path / "there" / "same")
    assert RunDirectory.default(named).path in found


def test_the_last_batch_is_found_in_sparks_log(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert directory.batch() is None
    assert not directory.reached().vbuckets
    spark = Path(directory.spark)
    offsets = spark / "offsets"
    offsets.mkdir(parents=True)
    (spark / "commits").mkdir()
    for number, seqno in enumerate((10, 25)):
        packed = Offset([VbucketOffset.consistent_at(3, 0x55, seqno), VbucketOffset(4)]).packed()
        (offsets / str(number)).write_text("v1\n" + json.dumps({"batchWatermarkMs": 0}) + "\n" + json.dumps(packed))
    (spark / "commits" / "0").write_text("v1\n{}")
    assert directory.reached().vbuckets[3].seqno == 10
    batch = directory.batch()
    assert batch is not None
    assert (batch.number, batch.is_done) == (1, False)
    assert [(number, asked.start.seqno, asked.end_seqno) for number, asked in batch.ranges.items()] == [(3, 10, 25)]
    (spark / "commits" / "1").write_text("v1\n{}")
    assert (found := directory.batch()) is not None
    assert found.is_done
    assert directory.reached().vbuckets[3].seqno == 25


def test_what_is_kept_is_there_whole_or_as_it_was(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert directory.read("marks.json") is None
    directory.write("marks.json", {"1": [2, 3]})
    assert directory.read("marks.json") == {"1": [2, 3]}
    (tmp_path / "marks.json").write_bytes(b"{")
    with pytest.raises(CheckpointError, match="damaged"):
        directory.read("marks.json")
    assert [path.name for path in tmp_path.iterdir()] == ["marks.json"]
