"""The node: a server over the engine that speaks the memcached binary protocol.

``start`` runs one inside a program or a test::

    with upriver.node.start() as node:
        connect(node.address)

What stands here is imported when it is first used, so that the command line and the pytest plugin, which may never
need a node, do not wait for one.
"""

from typing import TYPE_CHECKING

from upriver.late_imports import late_imports

if TYPE_CHECKING:
    from upriver.node.build_info import compiled_parts, plain_parts
    from upriver.node.embedded import EmbeddedNode, start
    from upriver.node.options import NodeOptions, gather
    from upriver.node.server import Node

__all__ = [
    "EmbeddedNode",
    "Node",
    "NodeOptions",
    "compiled_parts",
    "gather",
    "plain_parts",
    "start",
]

__getattr__ = late_imports(
    __name__,
    build_info="compiled_parts plain_parts",
    embedded="EmbeddedNode start",
    options="NodeOptions gather",
    server="Node",
)
