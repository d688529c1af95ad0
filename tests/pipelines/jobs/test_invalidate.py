"""The pipeline invalidate: several caches, one of them down, a rollback."""

from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="the spark extra is not installed")

from tests.support.pipeline_model import row, table
from upriver.errors import NodeUnavailable, OptionError, Unreachable
from upriver.pipelines.core.directory import RunDirectory
from upriver.pipelines.core.registry import find
from upriver.pipelines.jobs.invalidate import Invalidate
from upriver.pipelines.targets.caches import Cache, Fresh


class Noting(Cache):
    """Records its calls, and is down as often as the test asks for it."""

    def __init__(self) -> None:
        self.shown = "noting"
        self.down = 0
        self.forgotten: list[bytes] = []
        self.fresh: list[Fresh] = []

    def forget(self, keys: Sequence[bytes]) -> None:
        self.forgotten += keys

    def refresh(self, items: Sequence[Fresh]) -> None:
        if self.down:
            self.down -= 1
            raise Unreachable(self.shown, "down")
        self.fresh += items

    def close(self) -> None:
        pass


def noting(tmp_path: Path, count: int = 1, **options: object) -> tuple[Invalidate, list[Noting]]:
    pipeline = Invalidate.of(options)
    caches = [Noting() for _ in range(count)]
    pipeline._caches = list(caches)
    pipeline.open(RunDirectory(tmp_path / "own"))
    return pipeline, caches


def test_changed_keys_are_forgotten_under_their_prefix(tmp_path: Path) -> None:
    pipeline, (cache,) = noting(tmp_path, prefix="app:")
    pipeline.apply(table([row(0, 1, "mutation", b"a", None), row(0, 2, "deletion", b"b", None)]), 0)
    assert cache.forgotten == [b"app:a", b"app:b"]
    assert pipeline.reader_options()["keysOnly"] == "true"
    assert pipeline.counts()["forgotten"] == 2
    pipeline.close()


def test_refreshed_keys_have_the_last_value(tmp_path: Path) -> None:
    pipeline, (cache,) = noting(tmp_path, mode="refresh")
    rows = [row(0, 1, "mutation", b"a", b"1"), row(0, 2, "mutation", b"a", b"2", flags=7, expiry=9)]
    pipeline.apply(table([*rows, row(0, 3, "expiration", b"b", None)]), 0)
    assert (cache.fresh, cache.forgotten) == ([Fresh(b"a", b"2", 7, 9)], [b"b"])
    assert "keysOnly" not in pipeline.reader_options()
    pipeline.close()


def test_a_rollback_forgets_what_was_seen_above_it(tmp_path: Path) -> None:
    pipeline, (cache,) = noting(tmp_path)
    pipeline.apply(table([row(0, n, "mutation", b"k%d" % n, None) for n in range(1, 6)]), 0)
    pipeline.open(RunDirectory(tmp_path / "own"))  # after a restart
    cache.forgotten.clear()
    pipeline.apply(table([row(0, 3, "rollback", None, None), row(0, 4, "mutation", b"new", None)]), 0)
    assert sorted(cache.forgotten) == [b"k4", b"k5", b"new"]
    cache.forgotten.clear()
    pipeline.apply(table([row(0, 0, "reset", None, None)]), 0)
    assert len(cache.forgotten) == 6
    assert pipeline.counts()["undone"] == 2
    pipeline.close()


def test_a_cache_that_is_down_for_a_while_gets_everything(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipeline, (first, second) = noting(tmp_path, 2)
    second.down = 3
    pipeline.apply(table([row(0, 1, "mutation", b"a", None)]), 0)
    assert (first.forgotten, second.forgotten) == ([b"a"], [b"a"])
    assert pipeline.counts()["retries"] == 3
    assert len(caplog.records) == 1  # not one for each attempt
    pipeline.close()


def test_a_batch_is_not_done_before_every_cache_has_it(tmp_path: Path) -> None:
    pipeline, (first, second) = noting(tmp_path, 2, wait="100ms")
    second.down = 1_000_000
    batch = table([row(0, 1, "mutation", b"a", None)])
    with pytest.raises(NodeUnavailable):
        pipeline.apply(batch, 0)
    assert (first.forgotten, second.forgotten) == ([b"a"], [])
    second.down = 0
    pipeline.apply(batch, 0)
    assert second.forgotten == [b"a"]
    pipeline.close()


def test_options_are_checked_before_anything_starts() -> None:
    assert find("invalidate") is Invalidate
    with pytest.raises(OptionError, match="memcached://HOST:PORT"):
        Invalidate.of(to="memcached://a,somewhere")
    pipeline = Invalidate.of(to="memcached://a:1, redis://:secret@b/1")
    assert pipeline.target == "memcached://a:1,redis://b/1"
    pipeline.close()
