"""``make demo`` starts two nodes, loads documents, and mirrors and indexes them on Spark while a writer keeps changing
them. It kills a node and restarts it, moves half of the vbuckets, and finally verifies that everything agrees.

If it does not, the exit code is 1: the demo is also a test.
"""

import argparse
import contextlib
import faulthandler
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from demo.agreement import differences, in_index, in_nodes, in_table
from demo.cluster import VBUCKETS, NodeProcess, cluster
from demo.record import Record
from demo.writer import CHANGES_PER_S, Writer
from upriver.pipelines import Summary, find, run

PIPELINES = ("mirror", "index")
#: Commands as a user types them.
UPRIVER = (sys.executable, "-m", "upriver")
#: No step takes this long on any machine.
PATIENCE_S = 300.0
console = Console(highlight=False)


class Follower(threading.Thread):
    """One pipeline that runs until it is stopped."""

    def __init__(self, name: str, source: str, to: Path, checkpoint: Path, record: Record) -> None:
        super().__init__(name=name)
        self._job = find(name).of(source=source, to=str(to))
        self._checkpoint = checkpoint
        self._record = record
        self._halt = threading.Event()
        self.summary: Summary | None = None
        self.failure: Exception | None = None

    def run(self) -> None:
        """Run until it is stopped or fails."""
        try:
            self.summary = run(self._job, checkpoint=self._checkpoint, on_progress=self._record.take, stop=self._halt)
        except Exception as error:
            self.failure = error

    def __str__(self) -> str:
        """Its progress and Spark's last output, to find out why it does not advance."""
        log = self._checkpoint / "spark.log"
        said = log.read_text(errors="replace").splitlines()[-40:] if log.exists() else []
        return "\n  ".join([f"{self.name}: {self._record.last(self.name)}", *said])

    def stop(self) -> None:
        """Stop it cleanly, with its checkpoint."""
        self._halt.set()
        self.join()
        if self.failure is not None:
            raise self.failure


@contextlib.contextmanager
def step(title: str) -> Iterator[None]:
    """Print a step and how long it took."""
    started = time.monotonic()
    console.print(f"[bold]→[/] {title}", end=" … ")
    yield
    console.print(f"[green]{time.monotonic() - started:.1f} s[/]")


def wait_for(condition: Callable[[], bool], what: str, followers: list[Follower]) -> None:
    """Wait until the condition holds; a failed pipeline or a timeout ends the demo."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        for follower in followers:
            if follower.failure is not None:
                raise follower.failure
        if time.monotonic() > deadline:
            faulthandler.dump_traceback()
            raise TimeoutError(f"gave up waiting for {what}\n" + "\n".join(map(str, followers)))
        time.sleep(0.1)


def disturb(nodes: tuple[NodeProcess, NodeProcess], record: Record, caught_up: Callable[[str], None]) -> None:
    """Kill and move while writer and pipelines go on."""
    first, second = nodes
    with step("kill -9 of the first node, then it comes back"):
        record.mark("kill -9")
        first.kill()
        time.sleep(1.0)  # long enough for every client to notice
        first.start()
        record.mark("it is back")
    caught_up("the pipelines to go on after the crash")
    with step(f"move {VBUCKETS // 2} of {VBUCKETS} vbuckets to the second node"):
        record.mark("move")
        move = [*UPRIVER, "move", f"0-{VBUCKETS // 2 - 1}", "--to", second.address, first.address]
        moved = subprocess.run(move, capture_output=True, text=True)
        if moved.returncode:
            raise RuntimeError(f"the move failed: {moved.stderr}")
        record.mark("moved")
    caught_up("the pipelines to go on after the move")


def demo(documents: int, directory: Path, picture: Path) -> bool:
    """Run the demo; returns whether all agree in the end."""
    record = Record()
    with cluster(directory) as nodes:
        source = f"{nodes[0].address},{nodes[1].address}"
        console.print(f"[bold]→[/] two nodes, {nodes[0].address} and {nodes[1].address}; load {documents:,} documents")
        sys.stdout.flush()  # before the command prints
        subprocess.run([*UPRIVER, "load", "--sample", str(documents), nodes[0].address], check=True)
        table, index = directory / "table", directory / "index.sqlite"
        record = Record()
        targets = {"mirror": table, "index": index}
        followers = [Follower(name, source, targets[name], directory / f"{name}-run", record) for name in PIPELINES]
        writer = Writer(source, [f"sample:{number:08d}" for number in range(documents)])
        for thread in (*followers, writer):
            thread.start()
        try:
            settled = _Settled(record, followers, documents)
            with step("mirror and index on Spark, while a writer changes documents"):
                settled("the pipelines to read everything")
            disturb(nodes, record, settled)
            with step("stop writing, let the pipelines finish"):
                writer.stop()
                record.mark("writer stops")
                wait_for(lambda: not differences(in_nodes(source), in_table(table)), "the table to agree", followers)
                wait_for(lambda: not differences(in_nodes(source), in_index(index)), "the index to agree", followers)
        finally:
            writer.stop()
            for follower in followers:
                follower.stop()
        return report(record, followers, writer, source, table, index, picture)


class _Settled:
    """Wait until each pipeline has advanced and has nothing left to do."""

    def __init__(self, record: Record, followers: list[Follower], rows: int) -> None:
        self._record = record
        self._followers = followers
        self._more = rows

    def __call__(self, what: str) -> None:
        wanted = {name: self._rows(name) + self._more for name in PIPELINES}
        wait_for(lambda: all(self._is_there(name, rows) for name, rows in wanted.items()), what, self._followers)
        self._more = CHANGES_PER_S

    def _rows(self, name: str) -> int:
        told = self._record.last(name)
        return 0 if told is None else told.rows

    def _is_there(self, name: str, rows: int) -> bool:
        told = self._record.last(name)
        return told is not None and told.rows >= rows and not told.waiting_for


def report(
    record: Record, followers: list[Follower], writer: Writer, source: str, table: Path, index: Path, picture: Path
) -> bool:
    """Print the numbers, draw the picture, and return whether everything agrees."""
    nodes = in_nodes(source)
    wrong = {"table": differences(nodes, in_table(table)), "index": differences(nodes, in_index(index))}
    shown = Table(
        "pipeline", "changes", "rows/s", "behind", "restarts", "rollbacks", "differ",
        caption="behind: at most, from the kill on",
    )  # fmt: skip
    for follower, target in zip(followers, ("table", "index"), strict=True):
        told = [progress for _, progress in record.progress[follower.name]]
        last = told[-1]
        changes, seconds = record.behind(follower.name)
        rates = sorted(progress.rows_per_s for progress in told if progress.rows_per_s)
        shown.add_row(
            follower.name,
            f"{last.rows:,}",
            f"{rates[-1]:,.0f}" if rates else "",
            f"{changes:,} / {seconds:.0f} s",
            str(last.restarts),
            str(last.counts.get("undone", 0)),
            str(len(wrong[target])),
        )
    console.print(shown)
    console.print(f"{len(nodes):,} documents; the writer made {writer.changes:,} changes in {record.seconds:.0f} s")
    record.draw(picture)
    console.print(f"picture: {picture}")
    agree = not any(wrong.values())
    for target, keys in wrong.items():
        if keys:
            console.print(f"the {target} and the nodes differ in {len(keys)}, among them {keys[:3]}", markup=False)
    console.print("[green]differences: 0[/]" if agree else "[red]they do not agree[/]")
    return agree


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--picture", type=Path, default=Path("demo/report.png"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="upriver-demo-") as directory:
        return 0 if demo(arguments.documents, Path(directory), arguments.picture) else 1


if __name__ == "__main__":
    sys.exit(main())
