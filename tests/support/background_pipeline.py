"""A pipeline that runs beside a test."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from upriver.pipelines import Job, RunProgress, Summary, run


class BackgroundPipeline:
    """A job that runs in a thread of this process, until it is stopped."""

    def __init__(self, job: Job, checkpoint: Path, **options: Any) -> None:
        self.stop = threading.Event()
        self.seen: list[RunProgress] = []
        self.summary: Summary | None = None
        self.failure: BaseException | None = None

        def work() -> None:
            try:
                self.summary = run(job, checkpoint=checkpoint, stop=self.stop, on_progress=self.seen.append, **options)
            except BaseException as error:
                self.failure = error

        self._thread = threading.Thread(target=work)
        self._thread.start()

    def __enter__(self) -> "BackgroundPipeline":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self._thread.join(120)
        assert not self._thread.is_alive()

    def wait(self, condition: Callable[[], bool]) -> None:
        """Until it holds; fails if the job has failed meanwhile."""
        for _ in range(2400):
            if self.failure is not None:
                raise self.failure
            if condition():
                return
            self._thread.join(0.1)
        raise AssertionError(f"it does not come: {self.seen[-1:]}")
