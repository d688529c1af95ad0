"""``upriver serve``: run a node until it is told to stop."""

import asyncio
import dataclasses
import json
import logging
import signal
import sys
from collections.abc import Callable
from typing import Any

import click

from upriver.cli.complaint import Complaint
from upriver.errors import UpriverError
from upriver.node.options import NodeOptions, gather
from upriver.node.server import Node


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def node_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """One command-line option for each field of ``NodeOptions``."""
    for field in reversed(dataclasses.fields(NodeOptions)):
        name = f"--{field.name.replace('_', '-')}"
        flag = field.type is bool
        default = "" if field.default in (None, False) else f"  [default: {field.default}]"
        decorate = click.option(
            name,
            field.name,
            is_flag=flag,
            default=None,
            type=None if flag else str,
            metavar=None if flag else _metavar(field),
            help=f"{field.metadata['help']}{default}",
        )
        command = decorate(command)
    return command


def _metavar(field: "dataclasses.Field[Any]") -> str:
    choices = getattr(field.type, "__args__", ())
    if choices and all(isinstance(choice, str) for choice in choices):
        return "|".join(choices)
    kinds = {"int": "N", "float": "S", "port": "PORT", "data": "DIR", "users": "FILE", "tls_cert": "FILE"}
    return kinds.get(field.name) or kinds.get(getattr(field.type, "__name__", ""), "TEXT")


@click.command(context_settings={"max_content_width": 120})
@node_options
@click.option("--config", metavar="FILE.toml", help="read options from a file")
def serve(config: str | None, **given: Any) -> None:
    """Run a node.

    Every option may also stand in the file that --config names (initial_vbuckets = "0-511"), or in an environment
    variable (UPRIVER_INITIAL_VBUCKETS). The command line wins over the environment, the environment over the file.
    """
    try:
        options = gather(given, file=config)
        _set_up_log(options)
        asyncio.run(_run(options))
    except UpriverError as error:
        raise Complaint(getattr(error, "detail", "") or str(error)) from None
    except OSError as error:
        raise Complaint(f"cannot listen: {error.strerror or error}") from None


def _set_up_log(options: NodeOptions) -> None:
    level = logging.getLevelName(options.log_level.upper())
    if not isinstance(level, int):
        raise Complaint(f"--log-level {options.log_level}: it is debug, info, warning or error")
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)-7s %(message)s")
    handler.setFormatter(JsonFormatter() if options.log_format == "json" else plain)
    logging.basicConfig(level=level, handlers=[handler], force=True)


async def _run(options: NodeOptions) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    node = await Node.open(options)
    where = "in memory" if options.data is None else f"in {options.data}"
    metrics = "" if node.metrics_port is None else f", metrics on port {node.metrics_port}"
    click.echo(f"upriver: bucket {options.bucket} {where} is served on {node.address}{metrics}")
    sys.stdout.flush()
    try:
        await stop.wait()
    finally:
        await node.close()
