"""Fixtures of the command tests: a node, and a function that runs commands against it."""

from tests.support.command_runner import node, run
from tests.support.guarded_node import guarded_node

__all__ = ["guarded_node", "node", "run"]
