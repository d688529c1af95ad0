"""The command line: one file per command, gathered here.

Every error is one line on standard error. The exit code is 2 for invalid input, and 1 for everything else. A command's
file is imported when the command runs or shows its own help: ``upriver --help`` imports none of them.
"""

import sys
from collections.abc import Iterator, MutableMapping
from importlib import import_module
from typing import Any, Final

import click

from upriver import __version__
from upriver.cli.errors import Failure, InputError, reason

__all__ = ["main"]

#: The commands with their summaries. Each is a function in a file of the same name, with an underscore for a hyphen,
#: and an underscore after a name that is reserved in Python.
COMMANDS: Final = {
    "backup": "Copy the data directory of a node, even while it runs.",
    "checkpoint": "Show, back up, restore and reset the checkpoints of consumers.",
    "compact": "Make the data file of a stopped node smaller.",
    "delete": "Delete a key.",
    "diff": "Compare two nodes, vbucket by vbucket.",
    "dump": "Write all documents as JSON lines or Parquet.",
    "explain": "Explain packets: byte diagram and list of fields.",
    "failover-log": "Show the failover logs of vbuckets.",
    "get": "Print the value of a key.",
    "load": "Store documents from JSON lines, CSV or Parquet, or sample documents.",
    "move": "Move vbuckets to another node while they are in use.",
    "replicate": "Keep copies of vbuckets on another node up to date, until Ctrl-C.",
    "restore": "Create a data directory from a backup.",
    "rollback-check": "Explain whether a consumer would be rolled back, and why.",
    "run": "Run a pipeline, such as replicate, mirror or index.",
    "search": "Search an index that the pipeline index keeps.",
    "serve": "Run a node until SIGTERM or SIGINT.",
    "set": "Store a value under a key.",
    "stats": "Show the statistics of a node.",
    "table": "Show, compact, vacuum and verify the tables of the pipeline mirror.",
    "tail": "Show changes as they happen, until Ctrl-C.",
    "user": "Add, list and remove the users of a node.",
    "vbucket": "List vbuckets, change their role, and delete dead ones.",
    "version": "Print versions, and which compiled parts are in use.",
}
#: The exit code after Ctrl-C, as shells report it.
INTERRUPTED: Final = 130


class LateCommands(MutableMapping[str, click.Command]):
    """The commands by name, each imported on first use."""

    def __init__(self) -> None:
        self._added: dict[str, click.Command] = {}

    def __getitem__(self, name: str) -> click.Command:
        if name in COMMANDS and name not in self._added:
            name_here = name.replace("-", "_")
            module = import_module(f"upriver.cli.commands.{name_here}")
            self._added[name] = getattr(module, f"{name_here}_", None) or getattr(module, name_here)
        return self._added[name]

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._added[name] = command

    def __delitem__(self, name: str) -> None:
        del self._added[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(COMMANDS.keys() | self._added.keys()))

    def __len__(self) -> int:
        return len(COMMANDS.keys() | self._added.keys())


class Commands(click.Group):
    """A group whose usage errors are one line, like all other errors."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.commands = LateCommands()

    def main(self, *arguments: Any, **options: Any) -> Any:
        """Run the command. An output error, such as a full disk, is also one line."""
        try:
            return super().main(*arguments, **options)
        except OSError as error:
            Failure(reason(error)).show()
            sys.exit(Failure.exit_code)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            where = ctx if error.ctx is None else error.ctx
            raise InputError(f"{error.format_message()} (try {where.command_path} --help)", where) from None
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="%(prog)s %(version)s")
def main() -> None:
    """Change streams of key-value stores: TAP, UPR and DCP.

    Upriver runs a node that streams every change, and consumes the change streams of any server that speaks the
    memcached binary protocol.
    """
