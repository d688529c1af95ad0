"""How far a pipeline is, as told by the events of its query."""

import json
from typing import Any

from upriver.pipelines.progress import Lag, Meter, Progress, Summary
from upriver.spark.offsets import Offset, Place


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def offset(*seqnos: int) -> str:
    return json.dumps(Offset(Place.whole_at(n, 0x5, seqno) for n, seqno in enumerate(seqnos)).packed())


def event(number: int, rows: int, end: str, latest: str | None, run: str = "r") -> dict[str, Any]:
    return {
        "runId": run,
        "batchId": number,
        "numInputRows": rows,
        "sources": [{"endOffset": end, "latestOffset": latest}],
    }


def test_rows_batches_and_lag_are_added_up_over_restarts() -> None:
    clock = Clock()
    meter = Meter(clock)
    assert meter.take(event(0, 100, offset(60, 40), offset(90, 60)))
    assert not meter.take(event(0, 100, offset(60, 40), offset(90, 60)))
    assert meter.lag.changes == 50
    clock.now = 2.0
    assert meter.take(event(1, 50, offset(90, 60), offset(90, 60)))
    assert (meter.rows, meter.batches, meter.lag.changes, meter.lag.seconds) == (150, 2, 0, 0.0)
    assert meter.take(event(1, 7, offset(90, 67), offset(90, 67), run="s"))
    assert (meter.rows, meter.batches) == (157, 3)
    assert meter.rows_per_s == 157 / 2
    clock.now = 60.0
    assert meter.rows_per_s == 0.0
    assert not meter.take({"runId": "s", "batchId": 2, "numInputRows": 0, "sources": [{"endOffset": "null"}]})


def test_a_batch_from_an_earlier_life_says_nothing_about_the_lag() -> None:
    meter = Meter()
    assert meter.take(event(3, 100, offset(60, 40), None))
    assert (meter.rows, meter.lag.changes, meter.lag.seconds) == (100, None, None)


def test_the_lag_in_seconds_is_the_age_of_what_is_missing_longest() -> None:
    clock = Clock()
    lag = Lag(clock)
    assert (lag.changes, lag.seconds) == (None, None)
    lag.seen(0, 10)
    clock.now = 3.0
    lag.seen(5, 20)
    assert (lag.changes, lag.seconds) == (15, 3.0)
    lag.seen(10, 20)
    assert lag.seconds == 0.0  # what was first seen just now
    clock.now = 5.0
    assert lag.seconds == 2.0
    lag.seen(20, 20)
    assert (lag.changes, lag.seconds) == (0, 0.0)


def test_lines_of_json_hold_what_was_counted() -> None:
    progress = Progress("replicate", 1.26, 10, 7.94, 3, 0.55, 2, 1, {"written": 9})
    said = progress.as_json()
    assert (said["seconds"], said["lag_s"], said["written"], said["waiting_for"]) == (1.3, 0.6, 9, "")
    summary = Summary("replicate", "/there", progress, True).as_json()
    assert (summary["summary"], summary["checkpoint"], summary["interrupted"], summary["rows"]) == (
        True, "/there", True, 10,
    )  # fmt: skip
    json.dumps(summary)
