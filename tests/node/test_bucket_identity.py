from pathlib import Path

import pytest

from upriver.errors import StorageError
from upriver.node import start
from upriver.node.bucket_identity import BUCKET_FILE, bucket_uuid


def test_the_same_bucket_is_known_again(tmp_path: Path) -> None:
    uuid = bucket_uuid(tmp_path, "one")
    assert len(bytes.fromhex(uuid)) == 16
    assert bucket_uuid(tmp_path, "one") == uuid
    (tmp_path / "other").mkdir()
    assert bucket_uuid(tmp_path / "other", "one") != uuid


def test_what_is_only_in_memory_is_another_one_each_time() -> None:
    assert bucket_uuid(None, "one") != bucket_uuid(None, "one")


def test_the_data_of_another_bucket_is_refused(tmp_path: Path) -> None:
    with start(data=str(tmp_path), vbuckets=1, bucket="one"):
        pass
    with pytest.raises(StorageError, match="holds bucket 'one', not 'two'; use --bucket one"):
        start(data=str(tmp_path), vbuckets=1, bucket="two")
    with start(data=str(tmp_path), vbuckets=1, bucket="one"):
        pass


@pytest.mark.parametrize("content", [b"", b"[]", b'{"name": "one"}', b"\xff"])
def test_a_file_that_cannot_be_read(tmp_path: Path, content: bytes) -> None:
    (tmp_path / BUCKET_FILE).write_bytes(content)
    with pytest.raises(StorageError, match="invalid bucket identity"):
        bucket_uuid(tmp_path, "one")
