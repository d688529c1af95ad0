"""Pipelines: jobs on a change stream. They run from the command line, a file, Python, or a declarative pipeline.

::

    from upriver.pipelines import find, run

    run(find("replicate").of(source="a:11210", to="b:11210"), once=True)
"""

from upriver.pipelines.core.pipeline import Job, Pipeline, Task
from upriver.pipelines.core.progress import RunProgress, Summary
from upriver.pipelines.core.registry import find
from upriver.pipelines.core.runner import run
from upriver.pipelines.sinks.declaring import declare

__all__ = ["Job", "Pipeline", "RunProgress", "Summary", "Task", "declare", "find", "run"]
