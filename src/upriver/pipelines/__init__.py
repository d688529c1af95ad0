"""What people do with a change stream, each a job on Spark: from the command line, from a file and from Python."""

from upriver.pipelines.pipeline import Job, Pipeline

__all__ = ["Job", "Pipeline"]
