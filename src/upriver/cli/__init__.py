"""The command line: one file per command, gathered here.

Whatever goes wrong with what the user gave is one line on standard error and exit code 2.
"""

from typing import Any

import click

from upriver import __version__
from upriver.cli import explain, serve, user, version
from upriver.cli.complaint import Complaint


class Commands(click.Group):
    """A group whose usage errors take one line, like every other complaint."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            where = ctx if error.ctx is None else error.ctx
            raise Complaint(f"{error.format_message()} (try {where.command_path} --help)", where) from None


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="%(prog)s %(version)s")
def main() -> None:
    """Change streams of key-value stores: TAP, UPR and DCP.

    Upriver streams every change of a store that speaks the memcached binary protocol to whoever needs it.
    """


for command in (explain.explain, serve.serve, user.user, version.version):
    main.add_command(command)
