"""Files of entries: what is read back, and what counts as absent."""

from pathlib import Path

import numpy as np
import pytest

from upriver.tables.keys import entry_file
from upriver.tables.keys.entry_file import HEADER_BYTES, EntryWriter, open_entries

KIND = b"UPRITEST"
SEED = bytes(range(16))
ENTRIES = np.arange(40, dtype=np.uint64).reshape(-1, 2)


@pytest.fixture(autouse=True)
def _nothing_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_file, "_verified", set())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    writer = EntryWriter(path, KIND, SEED)
    writer.append(ENTRIES[:7])
    writer.append(ENTRIES[7:7])
    writer.append(ENTRIES[7:])
    writer.finish(b"some")
    return path


def test_a_file_is_read_back(path: Path) -> None:
    found = open_entries(path, KIND, SEED)
    assert found is not None
    assert found.seed == SEED
    assert found.description == b"some"
    assert (found.entries == ENTRIES).all()
    assert open_entries(path, KIND) is not None


def test_a_file_without_entries(tmp_path: Path) -> None:
    EntryWriter(tmp_path / "file", KIND, SEED).finish(b"none")
    found = open_entries(tmp_path / "file", KIND, SEED)
    assert found is not None
    assert found.entries.shape == (0, 2)
    assert found.description == b"none"


def test_a_missing_file_or_another_kind_or_seed_counts_as_absent(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_entries(path.with_name("other"), KIND, SEED) is None
    assert open_entries(path, b"UPRIELSE", SEED) is None
    assert open_entries(path, KIND, bytes(16)) is None
    monkeypatch.setattr(entry_file, "HASH_VERSION", 2)
    assert open_entries(path, KIND, SEED) is None


def test_every_shorter_file_counts_as_absent(path: Path) -> None:
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        assert open_entries(path, KIND, SEED) is None
    path.write_bytes(content + b"\0" * 16)
    assert open_entries(path, KIND, SEED) is None


def test_every_damaged_byte_is_noticed(path: Path) -> None:
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :])
        assert open_entries(path, KIND, SEED) is None, f"byte {place}"


def test_an_unfinished_file_counts_as_absent(tmp_path: Path) -> None:
    writer = EntryWriter(tmp_path / "file", KIND, SEED)
    writer.append(ENTRIES)
    writer.close()
    assert (tmp_path / "file").stat().st_size == HEADER_BYTES + ENTRIES.nbytes
    assert open_entries(tmp_path / "file", KIND, SEED) is None


def test_entries_are_verified_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_entries(path, KIND, SEED) is not None
    monkeypatch.setattr(entry_file, "_is_intact", None)
    assert open_entries(path, KIND, SEED) is not None
