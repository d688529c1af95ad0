"""The commands of the node, one function per request. Importing this package fills the table ``COMMANDS``."""

from upriver.node.commands import cluster, connection, keyvalue, locks, meta, observe, statistics, vbuckets
from upriver.node.commands.dispatch import CommandHandler, run_command
from upriver.node.commands.registry import COMMANDS

__all__ = ["COMMANDS", "CommandHandler", "run_command"]

#: The modules whose functions are in the table.
_MODULES = (cluster, connection, keyvalue, locks, meta, observe, statistics, vbuckets)
