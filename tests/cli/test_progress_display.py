"""What is seen of a pipeline while it runs."""

import json
import sys
from dataclasses import replace

import pytest

from upriver.cli.progress_display import Watcher, line_of
from upriver.pipelines import RunProgress, Summary
from upriver.pipelines.jobs.observe import Observe
from upriver.pipelines.jobs.transition import Transition

PROGRESS = RunProgress("replicate", 2.0, 1500, 750.0, 40, 0.26, 3, 1, {"written": 1499, "known": 0}, "a:1: no answer")


def test_a_line_says_all_that_matters() -> None:
    assert line_of(PROGRESS) == (
        "replicate: 1,500 changes, 750/s, 40 changes and 0.3 s behind, 3 batches, 1 restarts, 1,499 written, "
        "waiting: a:1: no answer"
    )
    unknown = RunProgress("observe", 0.1, 0, 0.0, None, None, 0, 0)
    assert line_of(unknown) == "observe: 0 changes, 0/s, 0 batches"


def test_lines_of_json_in_a_pipe_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    with Watcher(Transition.of({"from": "a:1", "to": "b:1"})) as watcher:
        watcher.show(PROGRESS)
        watcher.show(PROGRESS)
    watcher.conclude(Summary("replicate", "/there", PROGRESS))
    out, err = capsys.readouterr()
    first, last = map(json.loads, out.splitlines())
    assert (first["rows"], first["written"], last["summary"], last["checkpoint"]) == (1500, 1499, True, "/there")
    assert err == ""


def test_a_warning_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    warned = replace(PROGRESS, warnings=("column n: a", "column m: b"))
    with Watcher(Transition.of({"from": "a:1", "to": "b:1"})) as watcher:
        for progress in (PROGRESS, warned, warned):
            watcher.show(progress)
    watcher.conclude(Summary("replicate", "/there", warned))
    out, err = capsys.readouterr()
    assert err.splitlines() == ["warning: column n: a", "warning: column m: b"]
    first, last = map(json.loads, out.splitlines())
    assert "warnings" not in first
    assert last["warnings"] == ["column n: a", "column m: b"]


def test_a_warning_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    warned = replace(PROGRESS, warnings=("column n: " + "long " * 50,))
    with Watcher(Transition.of({"from": "a:1", "to": "b:1"})) as watcher:
        watcher.show(warned)
        watcher.show(warned)
    watcher.conclude(Summary("replicate", "/there", warned))
    assert capsys.readouterr().err.count("warning: column n: long") == 1


def test_a_job_that_owns_the_output_has_its_progress_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    with Watcher(Observe.of({"from": "a:1"})) as watcher:
        watcher.show(PROGRESS)
    out, err = capsys.readouterr()
    assert out == ""
    assert json.loads(err)["rows"] == 1500


def test_a_table_and_a_line_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    job = Observe.of({"from": "a:1"})
    job.windows.add([{"window": 0, "name": "user", "event": "mutation", "changes": 20_000, "bytes": 9,
                      "largest": 9, "expiring": 1}], 0)  # fmt: skip
    with Watcher(job) as watcher:
        watcher.show(PROGRESS)
    watcher.conclude(Summary("observe", "/there", PROGRESS))
    _, err = capsys.readouterr()
    assert "prefix or key" in err
    assert "2000.0" in err
    assert "observe: 1,500 changes in 2.0 s (750/s), 3 batches, 1 restarts, 1,499 written" in err
    assert "40 changes behind; checkpoint: /there" in err
