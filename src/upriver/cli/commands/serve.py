"""``upriver serve``: run a node."""

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
from upriver.cli.errors import InputError
from upriver.errors import StatusError, UpriverError
from upriver.node import NodeOptions, gather, set_up_logs
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

    Every option can also be set in the file of --config (initial_vbuckets = "0-511") or in an environment variable
    (UPRIVER_INITIAL_VBUCKETS). The command line overrides the environment, and the environment overrides the file.

    The node prints one line with its address on standard output when it is ready.
    """
    try:
        options = gather(given, file=config)
        set_up_logs(options.log_level, options.log_format, sys.stderr)
        _raise_descriptor_limit()
        asyncio.run(_run(options))
    except StatusError as error:
        raise InputError(error.detail or str(error)) from None
    except UpriverError as error:
        raise InputError(str(error)) from None


def _raise_descriptor_limit() -> None:
    """Each connection needs a descriptor, and the usual soft limit is low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard), hard))


async def _run(options: NodeOptions) -> None:
    from upriver.node import Node  # here: the import is slow

    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def ask_to_stop() -> None:
        stop.set()
        for number in _SIGNALS:  # a second signal stops at once, without waiting for the disk
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup: the node keeps running
            loop.add_signal_handler(number, ask_to_stop)
    node = await Node.open(options)
    # Objects of the start stay: collecting garbage among them would block the node for 14 ms each time.
    gc.collect()
    gc.freeze()
    try:
        click.echo(_ready_line(node, options))  # flushes, and ignores a closed standard output
        await stop.wait()
        node.state.log.info("stopping; a second signal stops at once, as a crash would")
    finally:
        await node.close()


def _ready_line(node: "Node", options: NodeOptions) -> str:
    where = "in memory" if options.data is None else f"in {options.data}"
    further = "".join(f", {each.dialect or 'all'} on {each.address}" for each in node.listen_addresses[1:])
    metrics = "" if node.metrics_address is None else f", metrics on {node.metrics_address}"
    return f"upriver: bucket {options.bucket} {where} is served on {node.address}{further}{metrics}"
