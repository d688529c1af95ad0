"""The command line: one file per command, gathered here.

Whatever is wrong with what the user gave is one line on standard error and exit code 2; what goes wrong nevertheless
is one line and exit code 1. A command's file is imported when the command runs or shows its own help: ``upriver
--help`` waits for none of them.
"""

import sys
from collections.abc import Iterator, MutableMapping
from importlib import import_module
from typing import Any, Final

import click

from upriver import __version__
from upriver.cli.errors import Complaint, Failure, reason

__all__ = ["main"]

#: Each command is a function of its own name in a file of its own name, with an underscore for a hyphen, and one behind
#: a name that Python has taken; what the list of commands says about it.
COMMANDS: Final = {
    "backup": "Copy the data directory of a node, which may go on running.",
    "checkpoint": "Show, back up, restore and reset the checkpoints of consumers.",
    "delete": "Delete a key.",
    "diff": "Compare two nodes, vbucket by vbucket.",
    "dump": "Write all documents as JSON lines or Parquet.",
    "explain": "Show what packets say: the byte diagram and the list of fields.",
    "failover-log": "Show the branches that vbuckets have lived on, the newest first.",
    "get": "Print the value of a key.",
    "load": "Store documents from JSON lines, CSV or Parquet, or samples.",
    "mirror": "Compare a mirrored table with the nodes.",
    "move": "Move vbuckets to another node while they are in use.",
    "replicate": "Keep copies of vbuckets on another node up to date, until Ctrl-C.",
    "restore": "Make a data directory for a node from a backup.",
    "rollback-check": "Tell whether a consumer would be sent back, and why.",
    "run": "Carry out a pipeline: what people do with a change stream.",
    "search": "Search the index that the pipeline index keeps.",
    "serve": "Run a node until SIGTERM or SIGINT.",
    "set": "Store a value under a key, whatever was there.",
    "stats": "Show the statistics of a node.",
    "tail": "Show changes as they happen, until Ctrl-C.",
    "user": "Add, list and remove the users of a node.",
    "vbucket": "List the vbuckets of a node, set their state, and delete dead ones.",
    "version": "Print versions, and whether the compiled parts are in use.",
}
#: What a shell reports of a process that Ctrl-C has ended.
INTERRUPTED: Final = 130


class LateCommands(MutableMapping[str, click.Command]):
    """The commands by name, each imported when it is asked for."""

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
    """A group whose usage errors take one line, like every other complaint."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.commands = LateCommands()

    def main(self, *arguments: Any, **options: Any) -> Any:
        """Run what was typed; what cannot be printed, as on a full disk, is one line as well."""
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
            raise Complaint(f"{error.format_message()} (try {where.command_path} --help)", where) from None
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="%(prog)s %(version)s")
def main() -> None:
    """Change streams of key-value stores: TAP, UPR and DCP.

    Upriver streams every change of a store that speaks the memcached binary protocol to whoever needs it.
    """
