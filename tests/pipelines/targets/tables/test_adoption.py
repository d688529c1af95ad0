"""A table whose source has become another bucket, under the same checkpoint."""

from pathlib import Path

import pytest

from tests.support.mirrored_tables import mirror_now
from upriver.client import SyncKvClient
from upriver.errors import OtherBucket
from upriver.node import start
from upriver.pipelines.targets.tables.table_keeper import KeeperSettings
from upriver.tables import read


def test_another_bucket_is_refused_unless_it_is_adopted(tmp_path: Path) -> None:
    for name in ("one", "other"):
        with start(data=tmp_path / name, vbuckets=8) as node:
            with SyncKvClient(node.address) as kv:
                kv.set(name, b"{}")
            if name == "other":
                with pytest.raises(OtherBucket, match="--adopt"):
                    mirror_now(node.address, tmp_path / "t")
                assert read(tmp_path / "t")["_key"].to_pylist() == ["one"]
            table = mirror_now(node.address, tmp_path / "t", KeeperSettings(adopt=name == "other"))
    assert read(table.storage.url)["_key"].to_pylist() == ["other"]
