"""The ``#:`` comments beside fields and codes, read from the source: Python itself throws them away."""

import ast
import inspect
import io
import sys
import tokenize
from functools import cache
from types import ModuleType


def comment_on(cls: type, name: str) -> str:
    """What the source says about a field of a class, be it declared there or inherited."""
    for owner in cls.__mro__:
        module = sys.modules[owner.__module__]
        if hasattr(module, "__file__") and (comment := _comments(module).get((owner.__name__, name))):
            return comment
    return ""


@cache
def _comments(module: ModuleType) -> dict[tuple[str, str], str]:
    """The comments of a whole module by class and field: beside a field, or in the lines above it."""
    source = inspect.getsource(module)
    lines = {
        token.start[0]: token.string.removeprefix("#:").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and token.string.startswith("#:")
    }
    alone = {number for number, line in enumerate(source.splitlines(), 1) if line.lstrip().startswith("#:")}
    return {
        (cls.name, name): comment
        for cls in ast.parse(source).body
        if isinstance(cls, ast.ClassDef)
        for node in cls.body
        if (name := _assigned(node)) and (comment := _comment_at(node, lines, alone))
    }


def _assigned(node: ast.stmt) -> str | None:
    target = (
        node.target if isinstance(node, ast.AnnAssign) else node.targets[0] if isinstance(node, ast.Assign) else None
    )
    return target.id if isinstance(target, ast.Name) else None


def _comment_at(node: ast.stmt, lines: dict[int, str], alone: set[int]) -> str:
    first = node.lineno
    while first - 1 in alone:
        first -= 1
    above = [lines[number] for number in range(first, node.lineno)]
    return " ".join(above) or lines.get(node.end_lineno or node.lineno, "")
