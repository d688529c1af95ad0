"""``upriver serve``: run a node until it is told to stop."""

import asyncio
import contextlib
import dataclasses
import gc
import resource
import signal
import sys
from typing import TYPE_CHECKING, Any

import click

from upriver.cli.declared_options import declared_option
from upriver.cli.errors import Complaint
from upriver.errors import StatusError, UpriverError
from upriver.node import NodeOptions, gather, logs
from upriver.options import hyphenated

if TYPE_CHECKING:
    from upriver.node import Node

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@click.command(
    context_settings={"max_content_width": 120},
    params=[
        *(declared_option(field, hyphenated(field.name)) for field in dataclasses.fields(NodeOptions)),
        click.Option(["--config"], metavar="FILE.toml", help="Read options from a file."),
    ],
)
def serve(config: str | None, **given: Any) -> None:
    """Run a node until SIGTERM or SIGINT.

    Every option may also stand in the file that --config names (initial_vbuckets = "0-511"), or in an environment
    variable (UPRIVER_INITIAL_VBUCKETS). The command line wins over the environment, the environment over the file.

    One line on standard output says when the node is ready, and at which address.
    """
    try:
        options = gather(given, file=config)
        logs.set_up(options.log_level, options.log_format, sys.stderr)
        _raise_descriptor_limit()
        asyncio.run(_run(options))
    except StatusError as error:
        raise Complaint(error.detail or str(error)) from None
    except UpriverError as error:
        raise Complaint(str(error)) from None


def _raise_descriptor_limit() -> None:
    """Each connection is a descriptor, and the usual soft limit is for programs with few of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard), hard))


async def _run(options: NodeOptions) -> None:
    from upriver.node import Node  # here, so that --help need not wait for it

    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def ask_to_stop() -> None:
        stop.set()
        for number in _SIGNALS:  # who asks twice does not want to wait, not even for the disk
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup does, so that a node outlives its terminal
            loop.add_signal_handler(number, ask_to_stop)
    node = await Node.open(options)
    # What is there now stays: to look through all of it for garbage, time and again, keeps everybody waiting for 14 ms.
    gc.collect()
    gc.freeze()
    try:
        click.echo(_ready_line(node, options))  # which flushes, and is silent where a daemon has no standard output
        await stop.wait()
        node.state.log.info("stopping; a second signal stops at once, as a crash would")
    finally:
        await node.close()


def _ready_line(node: "Node", options: NodeOptions) -> str:
    where = "in memory" if options.data is None else f"in {options.data}"
    further = "".join(f", {each.dialect or 'all'} on {each.address}" for each in node.listen_addresses[1:])
    metrics = "" if node.metrics_address is None else f", metrics on {node.metrics_address}"
    return f"upriver: bucket {options.bucket} {where} is served on {node.address}{further}{metrics}"
