"""The node: a server over the engine that speaks the memcached binary protocol.

``start`` runs one inside a program or a test::

    with upriver.node.start() as node:
        connect(node.address)

What stands here is imported when it is first used, so that the command line and the pytest plugin, which may never
need a node, do not wait for one.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from upriver.node.embedded import EmbeddedNode, start
    from upriver.node.options import NodeOptions
    from upriver.node.server import Node

__all__ = ["EmbeddedNode", "Node", "NodeOptions", "start"]

_HOMES = {"EmbeddedNode": "embedded", "Node": "server", "NodeOptions": "options", "start": "embedded"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
