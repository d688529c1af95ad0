"""Work between batches, in a thread of its own.

A repair may read millions of documents. The runner meanwhile reports the progress, keeps an eye on the query, and can
stop: then the Spark jobs of the work are cancelled, and what is not committed is done again at the next start.
"""

import contextlib
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: How often the jobs of a work that should end are cancelled: it may start another one.
_CANCEL_S: Final = 0.1


class IdleWork:
    """Runs the work of a pipeline between its batches, one after the other."""

    def __init__(self, spark: "SparkSession") -> None:
        self._spark = spark
        self._tag = f"upriver-idle-{uuid.uuid4().hex}"
        #: One thread for all works: each thread that uses Spark has a thread in the JVM.
        self._pool: ThreadPoolExecutor | None = None
        self._last: Future[object] | None = None

    @property
    def is_running(self) -> bool:
        """Whether the work goes on."""
        return self._last is not None and not self._last.done()

    def start(self, work: Callable[[], object]) -> None:
        """Begin the work, unless the last one goes on; raises the error of the last one."""
        if self.is_running:
            return
        error = self.last_error()
        if error is not None:
            raise error
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "upriver-idle-work", self._mark_thread)
        self._last = self._pool.submit(work)

    def last_error(self) -> BaseException | None:
        """Why the last work, which has ended, has failed; once."""
        last, self._last = self._last, None
        return None if last is None else last.exception()

    def cancel(self) -> None:
        """Cancel the work, and wait until it has ended."""
        while self.is_running:
            assert self._last is not None
            with contextlib.suppress(Exception):  # Spark may have ended, or be reached by Connect
                self._spark.sparkContext.cancelJobsWithTag(self._tag)
            wait([self._last], _CANCEL_S)
        self._last = None
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _mark_thread(self) -> None:
        """Tag the jobs of this thread. A tag of the session would not reach those of the sessions of batches."""
        with contextlib.suppress(Exception):
            self._spark.sparkContext.addJobTag(self._tag)
