"""``upriver run``: run a pipeline."""

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any, Final

import click

from upriver.cli.declared_options import declared_option
from upriver.cli.errors import Failure, InputError
from upriver.cli.parameters import TIME, default_address, with_password
from upriver.cli.progress_display import Watcher
from upriver.cli.run_async import one_line_errors
from upriver.client import Address
from upriver.errors import OptionError, StorageError
from upriver.options import read_toml
from upriver.pipelines.core import PIPELINES, Job, JobOptions, find, shown_name

#: The names of the options in ``_SHARED``, which every pipeline has beside its own.
_RUNNING: Final = ("checkpoint", "once", "for", "forever", "master", "patience")
_INTERRUPTED: Final = 130


_SHARED: Final = (
    click.Option(["--checkpoint"], metavar="DIR", help="Directory for progress. [default: by source and target]"),
    click.Option(["--once"], is_flag=True, help="Stop at the changes that exist now."),
    click.Option(
        ["--for", "for_"], type=TIME, metavar="TIME", help="Stop after this time, not counting Spark's start."
    ),
    click.Option(["--forever"], is_flag=True, help="Run until Ctrl-C; the default."),
    click.Option(["--master"], metavar="URL", help="Use this Spark instead of a local one."),
    click.Option(
        ["--patience"],
        type=TIME,
        metavar="TIME",
        help="Fail after this long without a successful batch. [default: 10m]",
    ),
)


class PipelineCommands(MutableMapping[str, click.Command]):
    """A command for each pipeline, made from its options on first use."""

    def __init__(self) -> None:
        self._made: dict[str, click.Command] = {}

    def __getitem__(self, name: str) -> click.Command:
        if name not in self._made and name in PIPELINES:
            self._made[name] = command_of(name)
        return self._made[name]

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        del self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(PIPELINES))

    def __len__(self) -> int:
        return len(PIPELINES)


class Pipelines(click.Group):
    """The pipelines, each imported on first use."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.commands = PipelineCommands()

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Pipelines"):
            formatter.write_dl([(name, summary) for name, (_, summary) in sorted(PIPELINES.items())])


@click.group(cls=Pipelines, invoke_without_command=True, subcommand_metavar="[PIPELINE] [OPTIONS]")
@click.option("-f", "--file", metavar="FILE", help="Read the pipeline and its options from a TOML file.")
@click.pass_context
def run(ctx: click.Context, file: str | None) -> None:
    """Run a pipeline, such as replicate, mirror or index.

    The pipeline runs on a local Spark; nothing else has to be installed or started. A line shows its progress; in a
    pipe these are JSON lines. Ctrl-C stops it, and the same command resumes it. Temporary failures, such as an
    unreachable node, are retried. Any other failure ends the pipeline with an error that names the place, and leaves
    the checkpoint unchanged.

    A TOML file has the name of the pipeline under `pipeline`, and options under their names without leading hyphens.

    \b
    Examples:
      upriver run replicate --from 10.0.0.7:11210 --to 10.0.0.8:11210 --once
      upriver run -f copies.toml
    """
    if file is None:
        if ctx.invoked_subcommand is None:
            raise click.UsageError("give a pipeline, or a file with -f")
        return
    if ctx.invoked_subcommand is not None:
        raise click.UsageError("a pipeline and a file exclude each other: give one of them")
    _run_file(file)


def command_of(name: str) -> click.Command:
    """The command of a pipeline."""
    kind = find(name)

    def callback(**given: Any) -> None:
        running = {each: given.pop("for_" if each == "for" else each) for each in _RUNNING}
        carry_out(kind, {each: value for each, value in given.items() if value is not None}, running)

    summary = PIPELINES[name][1]
    declared = [declared_option(field, shown_name(field.name)) for field in dataclasses.fields(kind.options_type)]
    details = (inspect.getdoc(kind) or "").partition("\n\n")[2]  # its first paragraph is a summary too
    text = f"{summary}\n\n{details}"
    return click.Command(name, params=[*declared, *_SHARED], callback=callback, help=text, short_help=summary)


def _run_file(path: str) -> None:
    try:
        given = read_toml(Path(path))
    except StorageError as error:
        raise InputError(str(error)) from None
    name = given.pop("pipeline", None)
    if not isinstance(name, str):
        raise InputError(f'{path}: pipeline = "NAME" is missing; choose from {", ".join(sorted(PIPELINES))}')
    context = click.get_current_context()
    running: dict[str, Any] = dict.fromkeys(_RUNNING)
    for each, option in zip(_RUNNING, _SHARED, strict=True):
        if (value := given.pop(each, None)) is not None:
            running[each] = option.type.convert(value, option, context)
    with _plain_errors():
        kind = find(name)
    carry_out(kind, given, running)


def carry_out(kind: type[Job], given: dict[str, Any], running: dict[str, Any]) -> None:
    """Run a job to its end, and show its progress."""
    if sum(bool(running[each]) for each in ("once", "for", "forever")) > 1:
        raise click.UsageError("--once, --for and --forever exclude each other: give one of them")
    with _plain_errors():
        given = {"from": default_address(), **_from_named(given)}
        job = kind.of({**given, **_with_passwords(kind.options_type.read(given))})
    from upriver.pipelines.core import PATIENCE_S, run

    with one_line_errors(), Watcher(job) as watcher:
        summary = run(
            job,
            checkpoint=running["checkpoint"],
            once=bool(running["once"]),
            seconds=running["for"],
            master=running["master"],
            patience_s=running["patience"] or PATIENCE_S,
            on_progress=watcher.show,
        )
    watcher.conclude(summary)
    if summary.interrupted and running["once"]:
        click.get_current_context().exit(_INTERRUPTED)


def _from_named(given: dict[str, Any]) -> dict[str, Any]:
    """The options with the source under its public name."""
    return {"from" if name == "source" else name: value for name, value in given.items()}


def _with_passwords(options: JobOptions) -> dict[str, Address]:
    """The addresses among the options, with passwords from the environment."""
    return {
        shown_name(field.name): with_password(value)
        for field in dataclasses.fields(options)
        if isinstance(value := getattr(options, field.name), Address)
    }


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Turn an invalid option or a missing extra into one line."""
    try:
        yield
    except OptionError as error:
        raise InputError(str(error)) from None
    except ImportError as error:
        raise Failure(f"{error.name} is not installed: pip install 'upriver[pipelines]'") from None
