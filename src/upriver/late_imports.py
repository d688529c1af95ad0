"""Names that a package exports and imports only when they are first used.

Starting a command, a Spark worker or a test session must not wait for parts that it never uses::

    __getattr__ = late_imports(__name__, server="Node", embedded="EmbeddedNode start")

The package still imports the same names under ``TYPE_CHECKING``, for type checkers and for readers.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def late_imports(package: str, **modules: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package: each module of it, with the names that it defines, separated by spaces."""
    homes = {name: module for module, names in modules.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return find
