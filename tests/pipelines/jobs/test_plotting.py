"""The picture of what was observed."""

from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="the pipelines extra is not installed")

from upriver.pipelines.jobs.plotting import plot
from upriver.pipelines.jobs.windows import Window


def window(start: int, stored: int, deleted: int, expired: int) -> Window:
    made = Window(start, 10)
    for name, share in (("user", 3), ("order", 2), ("$cost$", 1)):
        made.add(name, "mutation", (stored * share, 10, 10, 0))
    made.add("user", "deletion", (deleted, 0, 0, 0))
    made.add("session", "expiration", (expired, 0, 0, 0))
    for n in range(12):
        made.add(f"user:{n}", None, (stored * (12 - n), 0, 0, 0))
    return made


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    windows = [window(1_790_000_000 + n * 10, 50 + 7 * n, 2 * n, 30 - n) for n in range(30) if n not in (11, 12, 13)]
    plot(windows, tmp_path / "seen.png", 10)
    data = (tmp_path / "seen.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 20_000


@pytest.mark.parametrize("windows", [[], [window(1_790_000_000, 1, 0, 0)]])
def test_little_is_drawn_too(windows: list[Window], tmp_path: Path) -> None:
    plot(windows, tmp_path / "seen.png", 10)
    assert (tmp_path / "seen.png").read_bytes().startswith(b"\x89PNG")
