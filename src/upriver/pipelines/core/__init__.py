"""What all pipelines share: options, plans, tasks, checkpoints, the runner with its restarts, progress and failures."""

from typing import TYPE_CHECKING

from upriver.late_imports import late_imports

if TYPE_CHECKING:
    from upriver.pipelines.core.failures import trouble
    from upriver.pipelines.core.options import JobOptions, shown_name
    from upriver.pipelines.core.pipeline import Job
    from upriver.pipelines.core.progress import RunProgress, Summary
    from upriver.pipelines.core.registry import PIPELINES, find
    from upriver.pipelines.core.runner import PATIENCE_S, run
    from upriver.pipelines.core.session import spark_session
    from upriver.pipelines.core.workers import ProcessWorkers, SparkWorkers, Workers

__all__ = [
    "PATIENCE_S",
    "PIPELINES",
    "Job",
    "JobOptions",
    "ProcessWorkers",
    "RunProgress",
    "SparkWorkers",
    "Summary",
    "Workers",
    "find",
    "run",
    "shown_name",
    "spark_session",
    "trouble",
]

__getattr__ = late_imports(
    __name__,
    failures="trouble",
    options="JobOptions shown_name",
    pipeline="Job",
    progress="RunProgress Summary",
    registry="PIPELINES find",
    runner="PATIENCE_S run",
    session="spark_session",
    workers="ProcessWorkers SparkWorkers Workers",
)
