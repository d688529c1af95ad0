"""The pipelines by name, each imported on first use: Spark and some targets are slow to import."""

from importlib import import_module
from typing import Final

from upriver.errors import OptionError
from upriver.pipelines.core.pipeline import Job

#: The module and class of each pipeline, and its summary.
PIPELINES: Final[dict[str, tuple[str, str]]] = {
    "index": ("upriver.pipelines.jobs.index:Index", "Keep a full-text index: a file, OpenSearch or Solr."),
    "invalidate": ("upriver.pipelines.jobs.invalidate:Invalidate", "Invalidate caches: memcached and Redis."),
    "mirror": (
        "upriver.pipelines.jobs.mirror:Mirror",
        "Keep the latest state as a Delta table, and the history if wanted.",
    ),
    "observe": (
        "upriver.pipelines.jobs.observe:Observe",
        "Count changes over time, by event and prefix, with hot keys.",
    ),
    "replicate": (
        "upriver.pipelines.jobs.replicate:Replicate",
        "Copy changes to another cluster, one way or both ways.",
    ),
    "transition": (
        "upriver.pipelines.jobs.transition:Transition",
        "Move vbuckets to another node, verified, with undo.",
    ),
}


def find(name: str) -> type[Job]:
    """The pipeline of this name."""
    if name not in PIPELINES:
        raise OptionError("pipeline", name, f"unknown pipeline; choose from {', '.join(sorted(PIPELINES))}")
    module, _, attribute = PIPELINES[name][0].partition(":")
    found: type[Job] = getattr(import_module(module), attribute)
    return found
