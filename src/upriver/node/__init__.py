"""The node: a server over the engine that speaks the memcached binary protocol.

``start`` runs one inside a program or a test::

    with upriver.node.start() as node:
        connect(node.address)

Each name is imported when it is first used: the command line and the pytest plugin may never need a node, and do not
wait for one.
"""

from typing import TYPE_CHECKING

from upriver.late_imports import late_imports

if TYPE_CHECKING:
    from upriver.node.build_info import compiled_parts, plain_parts
    from upriver.node.embedded import EmbeddedNode, start
    from upriver.node.logs import set_up_logs
    from upriver.node.options import NodeOptions, gather
    from upriver.node.server import Node

__all__ = [
    "EmbeddedNode",
    "Node",
    "NodeOptions",
    "compiled_parts",
    "gather",
    "plain_parts",
    "set_up_logs",
    "start",
]

__getattr__ = late_imports(
    __name__,
    build_info="compiled_parts plain_parts",
    embedded="EmbeddedNode start",
    logs="set_up_logs",
    options="NodeOptions gather",
    server="Node",
)
