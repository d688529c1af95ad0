"""The stub of the compiled table names exactly what the module has."""

import ast
from pathlib import Path

import pytest

from upriver.engine.table import _table

STUB = ast.parse(Path(_table.__file__).with_name("_table.pyi").read_text())


def names(nodes: list[ast.stmt]) -> set[str]:
    found = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return {name for name in found if not name.startswith("_")}


def public(thing: object) -> set[str]:
    return {name for name in vars(thing) if not name.startswith("_")}


def test_the_module() -> None:
    own = {name for name in public(_table) if getattr(getattr(_table, name), "__module__", "") == _table.__name__}
    assert names(STUB.body) == own


@pytest.mark.parametrize("node", [node for node in STUB.body if isinstance(node, ast.ClassDef)], ids=lambda n: n.name)
def test_a_class(node: ast.ClassDef) -> None:
    assert names(node.body) == public(getattr(_table, node.name))
    assert ast.get_docstring(node)


@pytest.mark.parametrize(
    "node", [node for node in ast.walk(STUB) if isinstance(node, ast.FunctionDef)], ids=lambda n: n.name
)
def test_a_function_has_types(node: ast.FunctionDef) -> None:
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    assert node.returns is not None
    assert all(argument.annotation is not None for argument in arguments if argument.arg != "self")
