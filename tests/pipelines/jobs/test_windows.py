"""Counting changes by window: parts of a batch add up to the whole, whatever the batches are."""

import json
from collections import Counter
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from upriver.pipelines.jobs.windows import COUNTS, KEYS_MAX, OTHERS, PREFIXES_MAX, Count, Window, Windows, counted

NOW = 1_790_000_000
Row = tuple[int, bytes, str, int, int]
rows = st.lists(
    st.tuples(
        st.integers(NOW, NOW + 100),
        st.sampled_from([b"user:1", b"user:2", b"order:1", b"plain", b"a:b:c", b"\xff:x"]),
        st.sampled_from(["mutation", "deletion", "expiration"]),
        st.integers(0, 1000),
        st.sampled_from([0, NOW + 500]),
    )
)


def batch(changes: list[Row]) -> pa.RecordBatch:
    seconds, keys, events, sizes, expiries = zip(*changes, strict=True) if changes else ((), (), (), (), ())
    return pa.record_batch(
        {
            "event": pa.array(events, pa.string()),
            "key": pa.array(keys, pa.binary()),
            "cas": pa.array([second * 10**9 + 77 for second in seconds], pa.int64()),
            "expiry": pa.array(expiries, pa.int64()),
            "size": pa.array([size if event == "mutation" else None
                              for size, event in zip(sizes, events, strict=True)], pa.int32()),
        }
    )  # fmt: skip


def prefix(key: bytes) -> str:
    text = key.decode(errors="backslashreplace")
    return text.split(":")[0] if ":" in text else ""


@given(rows, st.integers(0, 100))
def test_parts_add_up_to_the_whole(changes: list[Row], cut: int) -> None:
    windows = Windows(10, 1000, 0)
    for number, part in enumerate((changes[:cut], changes[cut:])):
        if part:
            windows.add(counted(batch(part), 10, ":").to_pylist(), number)
    expected: dict[tuple[int, str, str], Count] = {}
    hot: Counter[tuple[int, str]] = Counter()
    for second, key, event, size, expiry in changes:
        place = (second // 10 * 10, prefix(key), event)
        size = size if event == "mutation" else 0
        expected[place] = expected.get(place, Count()) + Count(1, size, size, int(expiry > 0))
        hot[place[0], key.decode(errors="backslashreplace")] += 1
    found = {
        (start, *names): count for start, window in windows.windows.items() for names, count in window.groups.items()
    }
    assert found == expected
    assert {(start, key): n for start, window in windows.windows.items() for key, n in window.keys.items()} == dict(hot)
    restored = Windows(10, 1000, 0)
    restored.restore(json.loads(json.dumps(windows.as_json())))
    assert restored.as_json() == windows.as_json()


def row(start: int, name: str = "user", event: str | None = "mutation", changes: int = 1) -> dict[str, Any]:
    return dict.fromkeys(COUNTS.names, 0) | {"window": start, "name": name, "event": event, "changes": changes}


def test_a_batch_that_comes_again_is_not_counted_again() -> None:
    windows = Windows(10, 10, 0)
    windows.add([row(0)], 3)
    windows.add([row(0)], 3)
    windows.add([row(0)], 2)
    assert windows.windows[0].by_event() == {"mutation": Count(1)}


def test_a_window_is_told_when_it_is_over_and_again_when_it_changes() -> None:
    windows = Windows(10, 10, late_s=5)
    windows.add([row(0), row(10)], 0)
    assert windows.over() == []
    windows.add([row(20)], 1)
    assert [window.start for window in windows.over()] == [0]
    assert windows.over() == []
    windows.add([row(0, changes=4)], 2)
    (late,) = windows.over()
    assert late.by_prefix() == {"user": Count(5)}
    assert [window.start for window in windows.over(all_of_them=True)] == [10, 20]


def test_only_the_newest_windows_are_kept_and_none_before_it_was_told() -> None:
    windows = Windows(10, 2, 0)
    for number in range(5):
        windows.add([row(number * 10)], number)
    assert sorted(windows.windows) == [0, 10, 20, 30, 40]
    windows.over(all_of_them=True)
    windows.add([row(50)], 5)
    assert sorted(windows.windows) == [40, 50]


def test_prefixes_and_keys_are_bounded() -> None:
    windows = Windows(10, 2, 0)
    many = [row(0, f"p{n}") for n in range(PREFIXES_MAX + 50)]
    keys = [row(0, f"k{n}", None, 1 + (n == 7)) for n in range(KEYS_MAX + 50)]
    windows.add(many + keys, 0)
    window = windows.windows[0]
    assert len(window.by_prefix()) == PREFIXES_MAX + 1
    assert window.of(OTHERS, "mutation").changes == 50
    assert len(window.keys) == KEYS_MAX
    assert window.keys.most_common(1) == [("k7", 2)]


def test_a_line_of_json_tells_rates_sizes_and_hot_keys() -> None:
    window = Window(NOW, 10)
    window.add("user", "mutation", (20, 400, 90, 5))
    window.add("user", "expiration", (3, 0, 0, 0))
    window.add("user:7", None, (9, 0, 0, 0))
    said = window.as_json(5)
    told = {"changes": 20, "per_s": 2.0, "mean_bytes": 20.0, "largest_bytes": 90, "expiring": 5}
    assert said["window"] == "2026-09-21T14:13:20Z"
    assert said["events"]["mutation"] == said["prefixes"]["user"]["mutation"] == told
    assert said["events"]["expiration"]["per_s"] == 0.3
    assert said["hot_keys"] == [{"key": "user:7", "changes": 9}]
    assert len(list(window.rows(5))) == 3


def test_a_change_whose_cas_tells_no_time_happened_now() -> None:
    changes = pa.record_batch(
        {"event": ["mutation"], "key": [b"k"], "cas": pa.array([9]), "expiry": pa.array([0]), "size": pa.array([1])}
    )
    assert counted(changes, 10, ":", now=NOW + 3.5).column("window").to_pylist() == [NOW, NOW]
