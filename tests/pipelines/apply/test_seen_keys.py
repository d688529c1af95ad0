"""The keys that a query has seen."""

from pathlib import Path

from tests.support.pipeline_model import row, table
from upriver.pipelines.apply.seen_keys import SeenKeys


def test_keys_are_told_by_where_they_were_seen(tmp_path: Path) -> None:
    seen = SeenKeys(tmp_path / "own" / "seen.db")
    seen.add(
        table([row(0, 5, "mutation", b"a", b""), row(0, 9, "deletion", b"b", None), row(1, 7, "mutation", b"a", b"")])
    )
    seen.add(table([row(0, 8, "mutation", b"a", b""), row(0, 3, "mutation", b"b", b"")]))
    assert seen.above(0, 8) == [b"b"]
    assert seen.above(0, 7) == [b"a", b"b"]
    seen.close()
    again = SeenKeys(tmp_path / "own" / "seen.db")
    assert again.above(1, 0) == [b"a"]
    assert again.above(2, 0) == []
    again.close()
