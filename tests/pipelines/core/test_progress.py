"""How far a pipeline is, and how far behind its source."""

import json
from collections.abc import Mapping
from typing import Any

from upriver.pipelines.core.progress import Lag, Meter, RunProgress, Summary


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def event(number: int, rows: int, run: str = "r") -> dict[str, Any]:
    return {"runId": run, "batchId": number, "numInputRows": rows}


def rows(event: Mapping[str, Any]) -> int:
    return int(event["numInputRows"])


def test_rows_and_batches_are_added_up_over_restarts() -> None:
    clock = Clock()
    meter = Meter(clock)
    assert meter.take(event(0, 100), rows)
    assert not meter.take(event(0, 100), rows)
    clock.now = 2.0
    assert meter.take(event(1, 50), rows)
    assert (meter.rows, meter.batches) == (150, 2)
    assert meter.take(event(1, 7, run="s"), rows)
    assert (meter.rows, meter.batches) == (157, 3)
    assert meter.rows_per_s == 157 / 2
    clock.now = 60.0
    assert meter.rows_per_s == 0.0
    assert not meter.take(event(2, 0, run="s"), rows)


def test_the_lag_in_seconds_is_the_age_of_what_is_missing_longest() -> None:
    clock = Clock()
    lag = Lag(clock)
    assert (lag.changes, lag.seconds) == (None, None)
    lag.seen({}, {0: 6, 1: 4})
    clock.now = 3.0
    lag.seen({0: 5}, {0: 10, 1: 10})
    assert (lag.changes, lag.seconds) == (15, 3.0)
    lag.seen({0: 5, 1: 5}, {0: 10, 1: 10})
    assert lag.seconds == 0.0  # what was first seen just now
    clock.now = 5.0
    assert lag.seconds == 2.0
    lag.seen({0: 10, 1: 10}, {0: 10, 1: 10})
    assert (lag.changes, lag.seconds) == (0, 0.0)


def test_a_source_that_rolled_back_leaves_no_lag_for_what_it_has_lost() -> None:
    clock = Clock()
    lag = Lag(clock)
    lag.seen({0: 50, 1: 10}, {0: 100, 1: 10})
    clock.now = 10.0
    lag.seen({0: 50, 1: 10}, {0: 40, 1: 10})
    assert (lag.changes, lag.seconds) == (0, 0.0)  # one vbucket that is ahead hides nothing of another
    lag.seen({0: 50, 1: 10}, {0: 40, 1: 13})
    clock.now = 11.0
    assert (lag.changes, lag.seconds) == (3, 1.0)


def test_the_oldest_look_is_never_forgotten() -> None:
    clock = Clock()
    lag = Lag(clock)
    for second in range(10_000):
        clock.now = float(second)
        lag.seen({}, {0: second + 1})
    assert (lag.changes, lag.seconds) == (10_000, 9_999.0)


def test_lines_of_json_hold_what_was_counted() -> None:
    progress = RunProgress("replicate", 1.26, 10, 7.94, 3, 0.55, 2, 1, {"written": 9})
    said = progress.as_json()
    assert (said["seconds"], said["lag_s"], said["written"], said["waiting_for"]) == (1.3, 0.6, 9, "")
    summary = Summary("replicate", "/there", progress, True).as_json()
    assert (summary["summary"], summary["checkpoint"], summary["interrupted"], summary["rows"]) == (
        True, "/there", True, 10,
    )  # fmt: skip
    json.dumps(summary)
