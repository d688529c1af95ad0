"""The interface of targets: what work is by default."""

from tests.support.pipeline_model import table
from upriver.pipelines.targets.target import ReadAhead, TargetProgress, Work


def test_work_clears_nothing_unless_told() -> None:
    work = Work(query="q", number=None, rows=table([]))
    assert (work.cleared, work.clear_all, dict(work.ahead)) == (frozenset(), False, {})


def test_a_target_that_was_never_written_knows_no_query() -> None:
    assert TargetProgress() == (None, -1, {})


def test_progress_is_told_as_it_was() -> None:
    progress = TargetProgress("q", 7, {3: ReadAhead(2**47, 5, 9)})
    assert TargetProgress.of_text(progress.as_text()) == progress
