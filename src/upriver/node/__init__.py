"""The node: a server over the engine that speaks the memcached binary protocol.

``start`` runs one inside a program or a test::

    with upriver.node.start(port=0) as node:
        connect(node.address)
"""

from upriver.node.embedded import EmbeddedNode, start
from upriver.node.options import NodeOptions
from upriver.node.server import Node

__all__ = ["EmbeddedNode", "Node", "NodeOptions", "start"]
