"""The progress of a running pipeline: a line or a table on a terminal, JSON lines in a pipe."""

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Final, Self

import click

from upriver.pipelines.core import Job, RunProgress, Summary

if TYPE_CHECKING:
    from rich.live import Live

#: Time between two lines in a pipe.
_LINE_S: Final = 5.0


class Watcher:
    """Shows the progress of a job, on standard error if that is a terminal, otherwise as JSON lines."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._live: Live | None = None
        self._written_at: float | None = None
        self._warned: set[str] = set()
        self._draws = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def __enter__(self) -> Self:
        if self._draws:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def show(self, progress: RunProgress) -> None:
        """Show the progress."""
        self._warn(progress)
        if self._live is not None:
            self._live.update(self._drawn(progress), refresh=True)
            return
        now = time.monotonic()
        if self._written_at is None or now - self._written_at >= _LINE_S:
            self._written_at = now
            self._line(progress.as_json())

    def conclude(self, summary: Summary) -> None:
        """Show the summary of a job that has ended."""
        self._warn(summary.last)
        if not self._draws:
            self._line(summary.as_json())
            return
        last = summary.last
        counts = "".join(f", {count:,} {name.replace('_', ' ')}" for name, count in last.counts.items() if count)
        rate = last.rows / last.seconds if last.seconds else 0.0
        click.echo(
            f"{summary.pipeline}: {last.rows:,} changes in {last.seconds:.1f} s ({rate:,.0f}/s), "
            f"{last.batches} batches, {last.restarts} restarts{counts}",
            err=True,
        )
        behind = "" if last.lag_changes is None else f"{last.lag_changes:,} changes behind; "
        click.echo(f"{behind}checkpoint: {summary.checkpoint}", err=True)

    def _warn(self, progress: RunProgress) -> None:
        """Show each warning once."""
        for warning in progress.warnings:
            if warning not in self._warned:
                self._warned.add(warning)
                if self._live is not None:
                    self._live.console.print(f"warning: {warning}", markup=False, highlight=False, soft_wrap=True)
                else:
                    click.echo(f"warning: {warning}", err=True)

    def _line(self, said: dict[str, Any]) -> None:
        click.echo(json.dumps(said, ensure_ascii=False), err=self._job.owns_output)

    def _drawn(self, progress: RunProgress) -> Any:
        from rich.box import SIMPLE
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        line = Text(line_of(progress))
        shown = self._job.table()
        if shown is None:
            return line
        columns, rows = shown
        table = Table(box=SIMPLE, header_style="bold")
        for place, name in enumerate(columns):
            right = bool(rows) and all(isinstance(row[place], int | float) for row in rows)
            table.add_column(name, justify="right" if right else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(f"{cell:,}" if isinstance(cell, int) else str(cell)) for cell in row))
        return Group(table, line)


def line_of(progress: RunProgress) -> str:
    """The progress in one line."""
    parts = [f"{progress.pipeline}: {progress.rows:,} changes", f"{progress.rows_per_s:,.0f}/s"]
    if progress.lag_changes is not None:
        parts.append(f"{progress.lag_changes:,} changes and {progress.lag_s or 0:.1f} s behind")
    parts.append(f"{progress.batches} batches")
    if progress.restarts:
        parts.append(f"{progress.restarts} restarts")
    parts += [f"{count:,} {name.replace('_', ' ')}" for name, count in progress.counts.items() if count]
    if progress.waiting_for:
        parts.append(f"waiting: {progress.waiting_for}")
    return ", ".join(parts)
