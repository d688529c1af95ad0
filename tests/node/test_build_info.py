"""What falls back to plain Python is told when a node starts."""

import importlib
import logging
import sys
from types import ModuleType

import pytest

from upriver.node import start
from upriver.node.build_info import compiled_parts, plain_parts
from upriver.wire.codec import frame_runs, tap_records

TOLD = "not compiled, and therefore many times slower: "


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]


def test_a_node_says_once_what_is_not_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(frame_runs, "change_run", frame_runs.plain_change_run)
    monkeypatch.setattr(tap_records, "lay_out", tap_records.plain_lay_out)
    named = ", ".join(plain_parts())
    assert "frames, tap records" in named
    with caplog.at_level(logging.WARNING), start(vbuckets=1):
        assert [each for each in warnings(caplog) if each.startswith(TOLD)] == [f"{TOLD}{named} (install again)"]


def test_a_node_whose_parts_are_compiled_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    if plain_parts():
        pytest.skip("not everything is compiled here")
    with caplog.at_level(logging.WARNING), start(vbuckets=1):
        assert not [each for each in warnings(caplog) if each.startswith(TOLD)]


def test_a_build_that_lacks_something_counts_as_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    stale = ModuleType("upriver.wire.codec._frame_runs")
    monkeypatch.setitem(sys.modules, "upriver.wire.codec._frame_runs", stale)
    kept = {name: getattr(frame_runs, name) for name in frame_runs.__all__}
    try:
        importlib.reload(frame_runs)
        assert not compiled_parts()["frames"]
    finally:
        monkeypatch.undo()
        importlib.reload(frame_runs)
        for name, function in kept.items():
            setattr(frame_runs, name, function)
