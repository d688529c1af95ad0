"""What all pipelines share: options, the runner with its restarts, progress, failures and the Spark sink."""

from typing import TYPE_CHECKING

from upriver.late_imports import late_imports

if TYPE_CHECKING:
    from upriver.pipelines.core.options import JobOptions, shown_name
    from upriver.pipelines.core.pipeline import Job
    from upriver.pipelines.core.progress import RunProgress, Summary
    from upriver.pipelines.core.registry import PIPELINES, find
    from upriver.pipelines.core.runner import PATIENCE_S, run
    from upriver.pipelines.core.sink import PipelineSink

__all__ = [
    "PATIENCE_S",
    "PIPELINES",
    "Job",
    "JobOptions",
    "PipelineSink",
    "RunProgress",
    "Summary",
    "find",
    "run",
    "shown_name",
]

__getattr__ = late_imports(
    __name__,
    options="JobOptions shown_name",
    pipeline="Job",
    progress="RunProgress Summary",
    registry="PIPELINES find",
    runner="PATIENCE_S run",
    sink="PipelineSink",
)
