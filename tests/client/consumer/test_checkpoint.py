"""Checkpoints: replaced in one step, refused if they are somebody else's, whole after any cut."""

import asyncio
import contextlib
import json
import os
from pathlib import Path

import pytest

from upriver.client import FileCheckpoint, KvClient, NodeCheckpoint, Progress
from upriver.client.consumer.checkpoint import encoded
from upriver.errors import CheckpointError
from upriver.model import Snapshot, StreamPosition
from upriver.node import EmbeddedNode


def progress(seqno: int) -> dict[int, Progress]:
    return {n: Progress.at(StreamPosition(7, seqno, Snapshot(seqno - 1, seqno + 1)), 1) for n in (0, 5)}


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    checkpoint = FileCheckpoint(tmp_path / "deep" / "down", "me")
    assert asyncio.run(checkpoint.load()) == {}
    for seqno in (5, 6, 7, 8, 9):
        asyncio.run(checkpoint.save(progress(seqno)))
    assert asyncio.run(FileCheckpoint(tmp_path / "deep" / "down", "me").load()) == progress(9)
    assert sorted(each.name for each in (tmp_path / "deep").iterdir()) == ["down", "down.1", "down.2"]
    assert FileCheckpoint(tmp_path / "deep" / "down.1", "me", 1).read() == progress(8)
    assert FileCheckpoint(tmp_path / "deep" / "down.2", "me", 1).read() == progress(7)


def test_a_file_cut_at_any_byte_gives_way_to_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "file"
    checkpoint = FileCheckpoint(path, "me")
    checkpoint.write(progress(5))
    checkpoint.write(progress(6))
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert checkpoint.read() == progress(5), size
    path.write_bytes(whole)
    assert checkpoint.read() == progress(6)


def test_a_file_damaged_at_any_byte_is_never_believed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    checkpoint = FileCheckpoint(path, "me")
    checkpoint.write(progress(5))
    checkpoint.write(progress(6))
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes((whole[place] ^ 0x11,)) + whole[place + 1 :])
        try:
            found = checkpoint.read()
        except CheckpointError:
            continue  # it looks like somebody else's
        assert found in (progress(5), progress(6)), place


def test_nothing_whole_is_an_error_and_not_a_new_start(tmp_path: Path) -> None:
    path = tmp_path / "file"
    checkpoint = FileCheckpoint(path, "me")
    checkpoint.write(progress(5))
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=r"all generations are damaged .*remove the file to start over"):
        checkpoint.read()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"something else\n", "not an Upriver checkpoint"),
        (b'{"what": "other"}\n', "not an Upriver checkpoint"),
        (b"\x00\xff", "not an Upriver checkpoint"),
        (
            b'{"what": "upriver-checkpoint", "format": 2}\n',
            "format is 2, but this version reads 1; use a later version",
        ),
        (encoded({}, "another"), "it belongs to 'another', not to 'me'"),
    ],
)
def test_what_is_not_ours_is_refused_and_left_alone(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        FileCheckpoint(path, "me").read()
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == data


@pytest.mark.parametrize("step", ["replace", "link", "fsync"])
@pytest.mark.parametrize("fail_at", [1, 2, 3])
def test_a_write_cut_at_any_step_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, fail_at: int
) -> None:
    checkpoint = FileCheckpoint(tmp_path / "file", "me")
    for seqno in (5, 6, 7):
        checkpoint.write(progress(seqno))
    real, calls = getattr(os, step), iter(range(1, 100))

    def failing(*arguments: object) -> object:
        if next(calls) == fail_at:
            raise OSError(28, "No space left on device")
        return real(*arguments)

    monkeypatch.setattr(os, step, failing)
    with contextlib.suppress(CheckpointError):
        checkpoint.write(progress(8))
    monkeypatch.undo()
    assert checkpoint.read() in (progress(7), progress(8))
    checkpoint.write(progress(9))
    assert checkpoint.read() == progress(9)


def test_a_place_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        FileCheckpoint(tmp_path / "file").read()
    with pytest.raises(CheckpointError, match="cannot be written"):
        FileCheckpoint(tmp_path / "file").write({})
    with pytest.raises(ValueError, match="must be at least 1"):
        FileCheckpoint(tmp_path / "file", generations=0)


def test_documents_of_a_node(upriver_node: EmbeddedNode) -> None:
    async def run() -> None:
        async with KvClient(upriver_node.address) as kv:
            checkpoint = NodeCheckpoint(kv, "job", "me")
            assert await checkpoint.load() == {}
            for seqno in (5, 6, 7):
                await checkpoint.save(progress(seqno))
            again = NodeCheckpoint(kv, "job", "me")
            assert await again.load() == progress(7)
            await again.save(progress(8))
            newest = NodeCheckpoint(kv, "job", "me")
            assert await newest.load() == progress(8)
            # The newer document is damaged: the one before it counts.
            for turn in range(2):
                key = f"_upriver:checkpoint:job:{turn}"
                item = await kv.get(key)
                assert item is not None
                if item.value.startswith(b"4\n"):
                    await kv.set(key, item.value[:-9])
            assert await newest.load() == progress(7)
            with pytest.raises(CheckpointError, match="belongs to 'me'"):
                await NodeCheckpoint(kv, "job", "you").load()

    asyncio.run(run())


def test_the_form_is_readable() -> None:
    head, body, rest = encoded(progress(5), "me").split(b"\n")
    assert rest == b""
    assert json.loads(head)["what"] == "upriver-checkpoint"
    assert json.loads(body)["vbuckets"]["5"][:4] == [7, 5, 4, 6]
