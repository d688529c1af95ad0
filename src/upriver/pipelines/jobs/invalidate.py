"""The pipeline invalidate: removes outdated values from caches in front of the nodes.

A batch is complete when every cache has it. While a cache is down the batch waits, and then fails: the checkpoint does
not advance, and the batch is repeated after a restart. So no invalidation is lost, and none has to be stored for a
cache that is down. A rollback deletes the keys that were seen above its seqno, in either mode, so that clients fetch
them from the nodes again.
"""

import itertools
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from upriver.client.transport import Backoff
from upriver.errors import NodeUnavailable
from upriver.options import as_any_text, as_seconds, as_text, one_of, option
from upriver.pipelines.apply.applying import OF_VBUCKETS, latest
from upriver.pipelines.apply.seen_keys import SeenKeys
from upriver.pipelines.core.directory import RunDirectory
from upriver.pipelines.core.options import PipelineOptions
from upriver.pipelines.core.row_pipeline import RowPipeline
from upriver.pipelines.targets.caches import Cache, Fresh, cache_at

LOG: Final = logging.getLogger("upriver.pipelines")
MODES: Final = ("delete", "refresh")


@dataclass(frozen=True, slots=True, kw_only=True)
class InvalidateOptions(PipelineOptions):
    """The options of invalidate."""

    to: str = option(
        "memcached://127.0.0.1:11211", as_text, "caches to invalidate", "memcached://HOST:PORT,redis://HOST:PORT/0,…"
    )
    mode: str = option("delete", one_of(*MODES), "what to do with changed keys")
    prefix: str = option("", as_any_text, "prefix of each key in the caches")
    wait: float = option(30.0, as_seconds, "how long a batch waits for a cache that is down")


class Invalidate(RowPipeline):
    """Deletes or refreshes changed keys in caches."""

    name = "invalidate"
    options_type = InvalidateOptions
    options: InvalidateOptions

    def __init__(self, options: InvalidateOptions) -> None:
        super().__init__(options)
        self._caches: list[Cache] = [cache_at(url.strip()) for url in options.to.split(",")]
        self._seen: SeenKeys | None = None
        self._prefix = options.prefix.encode()
        self._counts = {"forgotten": 0, "refreshed": 0, "undone": 0, "retries": 0}

    @property
    def target(self) -> str:
        """The caches, without passwords."""
        return ",".join(cache.shown for cache in self._caches)

    def reader_options(self) -> dict[str, str]:
        """Values are read only to refresh caches."""
        return {**super().reader_options(), **({"keysOnly": "true"} if self.options.mode == "delete" else {})}

    def open(self, directory: RunDirectory) -> None:
        """Open the file of seen keys."""
        super().open(directory)
        if self._seen is not None:
            self._seen.close()
        self._seen = SeenKeys(directory.path / "seen.db")

    def apply(self, found: pa.Table, batch_number: int) -> None:  # noqa: ARG002
        """Apply one batch to all caches."""
        assert self._seen is not None, "the pipeline is not open"
        is_mark = pc.is_in(found.column("event"), pa.array(OF_VBUCKETS))
        marks, rows = found.filter(is_mark), latest(found.filter(pc.invert(is_mark)))
        self._seen.add(rows)
        forgotten, fresh = self._of_rows(rows)
        forgotten = list(dict.fromkeys(forgotten + self._of_marks(marks)))
        with ThreadPoolExecutor(len(self._caches)) as pool:
            for done in [pool.submit(self._tell, cache, forgotten, fresh) for cache in self._caches]:
                done.result()
        counted = {"forgotten": len(forgotten), "refreshed": len(fresh), "undone": marks.num_rows}
        for name, count in counted.items():
            self._counts[name] += count

    def counts(self) -> dict[str, int]:
        """Counts since the first start."""
        return dict(self._counts)

    def close(self) -> None:
        """Close the caches and the file."""
        for cache in self._caches:
            cache.close()
        if self._seen is not None:
            self._seen.close()
            self._seen = None

    def _of_rows(self, rows: pa.Table) -> tuple[list[bytes], list[Fresh]]:
        columns = {name: rows.column(name).to_pylist() for name in ("event", "key", "value", "flags", "expiry")}
        if self.options.mode == "delete":
            return [self._prefix + key for key in columns["key"]], []
        forgotten: list[bytes] = []
        fresh: list[Fresh] = []
        for event, key, value, flags, expiry in zip(*columns.values(), strict=True):
            if event == "mutation":
                fresh.append(Fresh(self._prefix + key, value, flags, expiry))
            else:
                forgotten.append(self._prefix + key)
        return forgotten, fresh

    def _of_marks(self, marks: pa.Table) -> list[bytes]:
        """The keys of a rollback: those that were seen above its seqno."""
        assert self._seen is not None
        back: dict[int, int] = {}
        columns = (marks.column(name).to_pylist() for name in ("vbucket", "event", "seqno"))
        for vbucket, event, seqno in zip(*columns, strict=True):
            to = seqno if event == "rollback" else 0
            back[vbucket] = min(to, back.get(vbucket, to))
        keys = [key for vbucket, seqno in back.items() for key in self._seen.above(vbucket, seqno)]
        return [self._prefix + key for key in keys]

    def _tell(self, cache: Cache, forgotten: list[bytes], fresh: list[Fresh]) -> None:
        """Apply a batch to one cache, with retries while it is down."""
        backoff, deadline = Backoff(), time.monotonic() + self.options.wait
        for attempt in itertools.count():
            try:
                cache.refresh(fresh)
                cache.forget(forgotten)
                return
            except NodeUnavailable as error:
                pause_s = backoff.pause_s()
                if time.monotonic() + pause_s >= deadline:
                    raise
                if not attempt:  # log only the first; the count of retries shows the others
                    LOG.warning("%s; retrying for %g s", error, self.options.wait)
                self._counts["retries"] += 1
                time.sleep(pause_s)
