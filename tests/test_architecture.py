"""The rules that keep the layers apart, and the house in order (docs/architecture.md).

Everything is read from the source text, so the rules also hold for modules that no test imports, and for
layers that do not exist yet.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "upriver"
TESTS = ROOT / "tests"

#: Modules without a layer of their own, which node, client and everything above them may import.
BASE = frozenset({"errors", "files", "late_imports", "network", "options", "scram"})
#: Which layers each layer may import, besides itself.
BELOW: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "late_imports": frozenset(),
    "network": frozenset(),
    "scram": frozenset(),
    "files": frozenset({"errors"}),
    "options": frozenset({"errors"}),
    "model": frozenset({"errors"}),
    "wire": frozenset({"errors", "model"}),
    "engine": frozenset({"errors", "files", "model"}),
    "protocol": frozenset({"errors", "model", "wire"}),
    "node": BASE | {"model", "wire", "protocol", "engine"},
    "client": BASE | {"model", "wire", "protocol"},
    "spark": BASE | {"model", "wire", "protocol", "client"},
    "tables": BASE | {"model"},
    "pipelines": BASE | {"model", "wire", "protocol", "client", "spark", "tables"},
    "testing": BASE | {"model", "wire", "protocol", "engine", "node"},
    "cli": BASE | {"model", "wire", "engine", "protocol", "node", "client", "spark", "tables", "pipelines"},
}
#: Where time and bytes are arguments, so that whole clusters can run in a deterministic simulation.
PURE = frozenset({"model", "wire", "protocol"})
IMPURE_MODULES = frozenset(
    {
        "asyncio", "concurrent", "datetime", "multiprocessing", "os", "random", "secrets", "select", "selectors",
        "signal", "socket", "socketserver", "ssl", "subprocess", "threading", "time", "uuid", "uvloop",
    }
)  # fmt: skip
#: Module and import that may break the rule of purity, each with its reason: none so far.
IMPURE_ALLOWED: dict[tuple[str, str], str] = {}
DRAWERS = frozenset({"utils", "util", "helpers", "helper", "common", "misc", "manager", "wrapper", "models"})
FUNCTION_LINES_MAX = 70
MODULES_MAX = 15
#: Folders that hold one file per command or per text, however many there are.
LISTS = frozenset({"cli/commands", "wire/dialects"})
#: Class names that are defined twice, each with its reason.
TWICE_ALLOWED: dict[str, str] = {
    "RowReader": "the compiled reader and its plain twin, which parity tests compare",
    "Table": "a vbucket's items in the compiled engine, and a Delta table: neither layer imports the other",
}
#: Folders whose modules are namespaces: messages are named after their dialect, as in ``dcp.Mutation``.
NAMESPACES = frozenset({"upriver.wire.dialects"})


@dataclass(frozen=True)
class Module:
    """One source file."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.relative_to(SOURCE).as_posix()

    @property
    def layer(self) -> str:
        return self.path.relative_to(SOURCE).parts[0].removesuffix(self.path.suffix)

    @property
    def compiled(self) -> bool:
        return self.path.suffix != ".py"

    def __str__(self) -> str:
        return self.name


def modules(*suffixes: str) -> list[Module]:
    paths = (path for path in SOURCE.rglob("*") if path.suffix in (suffixes or (".py", ".pyx", ".pxd")))
    return [Module(path) for path in sorted(paths)]


@cache
def tree_of(module: Module) -> ast.Module:
    return ast.parse(module.path.read_text(), str(module.path))


@cache
def imports_of(module: Module) -> tuple[tuple[int, str], ...]:
    """Line and full name of everything that the module imports."""
    found = _cython_statements(module, "c?import") if module.compiled else _python_statements(module)
    return tuple((line, f"{origin}.{name}" if name else origin) for line, origin, name in found)


def _python_statements(module: Module) -> Iterator[tuple[int, str, str]]:
    """Line, origin and name of each import; ``import a.b`` has no name."""
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = _absolute(module, node.level, node.module or "")
            yield from ((node.lineno, origin, alias.name) for alias in node.names)


def _cython_statements(module: Module, keyword: str) -> Iterator[tuple[int, str, str]]:
    """The same for a compiled module, of statements with this keyword."""
    # A list in parentheses may go on in the next lines.
    text = re.sub(r"\(([^()]*)\)", lambda found: found[0].replace("\n", "\x0b"), module.path.read_text())
    statement = re.compile(
        rf"^\s*{keyword}\s+(?P<names>.+)$|^\s*from\s+(?P<origin>\.*[\w.]*)\s+{keyword}\s+(?P<parts>.+)$", re.DOTALL
    )
    number = 1
    for line in text.split("\n"):
        found = statement.match(re.sub(r"#[^\x0b]*", "", line))
        if found is not None and found["names"]:
            yield from ((number, name.split()[0], "") for name in found["names"].split(","))
        elif found is not None:
            level = len(found["origin"]) - len(found["origin"].lstrip("."))
            origin = _absolute(module, level, found["origin"].lstrip("."))
            parts = re.findall(r"\w+", re.sub(r"\bas\s+\w+", "", found["parts"]))
            yield from ((number, origin, part) for part in parts)
        number += 1 + line.count("\x0b")


def _absolute(module: Module, level: int, origin: str) -> str:
    if not level:
        return origin
    package = ["upriver", *module.path.relative_to(SOURCE).parent.parts]
    return ".".join([*package[: len(package) - level + 1], *([origin] if origin else [])])


def test_there_is_something_to_check() -> None:
    assert {"errors", "model", "wire"} <= {module.layer for module in modules()}


def test_every_layer_has_its_rules() -> None:
    unknown = {module.layer for module in modules()} - set(BELOW) - {"__init__", "__main__"}
    assert not unknown, f"docs/architecture.md has no place for {', '.join(sorted(unknown))}"


def test_layers_import_only_what_lies_below() -> None:
    wrong = [
        f"{module}:{line} imports {name}: {module.layer} may know {', '.join(sorted(BELOW[module.layer])) or 'nothing'}"
        for module in modules()
        if module.layer in BELOW
        for line, name in imports_of(module)
        if name.startswith("upriver.")
        and (target := name.split(".")[1]) in BELOW
        and target not in BELOW[module.layer] | {module.layer}
    ]
    assert not wrong, "\n".join(wrong)


def test_the_rules_themselves_have_no_cycle() -> None:
    for layer, below in BELOW.items():
        for other in below:
            assert layer not in BELOW[other], f"{layer} and {other} may import each other"
            assert BELOW[other] <= below, f"{layer} may import {other}, but not all that {other} may"
    assert "wire" not in BELOW["engine"]
    assert not {"node", "engine"} & BELOW["client"]


def test_model_wire_and_protocol_know_no_clock_socket_or_thread() -> None:
    wrong = [
        f"{module}:{line} imports {name}: time, bytes and chance are arguments there"
        for module in modules()
        if module.layer in PURE
        for line, name in imports_of(module)
        if (top := name.split(".")[0]) in IMPURE_MODULES and (module.name, top) not in IMPURE_ALLOWED
    ]
    assert not wrong, "\n".join(wrong)


def test_there_are_no_drawers() -> None:
    parts = [
        (path.relative_to(SOURCE), path.stem.lstrip("_"))
        for path in SOURCE.rglob("*")
        if path.is_dir() or path.suffix in (".py", ".pyx")
    ]
    wrong = [f"{path}: a place needs a name, '{stem}' is a drawer" for path, stem in parts if stem in DRAWERS]
    assert not wrong, "\n".join(wrong)


def test_no_folder_is_crowded() -> None:
    found = {
        folder: sorted({path.stem for path in folder.iterdir() if path.suffix in (".py", ".pyx")} - {"__init__"})
        for folder in [SOURCE, *(path for path in SOURCE.rglob("*") if path.is_dir() and path.name != "__pycache__")]
    }
    wrong = [
        f"{folder.relative_to(SOURCE)} has {len(inside)} modules, at most {MODULES_MAX} can be taken in at a glance"
        for folder, inside in found.items()
        if len(inside) > MODULES_MAX and folder.relative_to(SOURCE).as_posix() not in LISTS
    ]
    assert not wrong, "\n".join(wrong)


def test_every_folder_of_source_is_a_package() -> None:
    wrong = [
        path.relative_to(SOURCE)
        for path in SOURCE.rglob("*")
        if path.is_dir() and path.name != "__pycache__" and not (path / "__init__.py").exists()
    ]
    assert not wrong, f"without an __init__.py that says what lives there: {wrong}"


_COMPILED_CLASS = re.compile(r"^(?:cdef )?class (\w+)", re.MULTILINE)


def classes_of(module: Module) -> list[str]:
    """The classes that a module defines, also a compiled one and the types that describe it."""
    if module.compiled:
        return _COMPILED_CLASS.findall(module.path.read_text())
    return [node.name for node in tree_of(module).body if isinstance(node, ast.ClassDef)]


def test_no_public_class_name_is_used_twice() -> None:
    homes: dict[str, set[str]] = {}
    for module in modules(".py", ".pyx", ".pyi"):
        if module.path.parent.relative_to(SOURCE).as_posix() == "wire/dialects":
            continue
        for name in classes_of(module):
            if not name.startswith("_"):
                homes.setdefault(name, set()).add(module.name.removesuffix(module.path.suffix))
    twice = {name: where for name, where in homes.items() if len(where) > 1}
    wrong = [f"{name} is defined in {' and '.join(sorted(where))}" for name, where in twice.items()]
    assert twice.keys() <= TWICE_ALLOWED.keys(), "\n".join(wrong)
    assert twice.keys() >= TWICE_ALLOWED.keys(), "an exception that is not needed any more"


def exports_of(package: Path) -> frozenset[str]:
    """What a package lists in its ``__all__``."""
    for node in tree_of(Module(package / "__init__.py")).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return frozenset(ast.literal_eval(node.value))
    return frozenset()


def imports_between_layers(module: Module) -> Iterator[tuple[int, str, str]]:
    """Line, origin and name of each thing that a module imports from another layer. ``import a.b`` has no name.

    A ``cimport`` must name the module that declares the C types, so it is not among them.
    """
    found = _cython_statements(module, "import") if module.compiled else _python_statements(module)
    for line, origin, name in found:
        if origin == "upriver" and (SOURCE / name).is_dir():
            origin, name = f"upriver.{name}", ""
        if origin.startswith("upriver.") and origin.split(".")[1] != module.layer:
            yield line, origin, name


def is_module(name: str) -> bool:
    path = SOURCE.joinpath(*name.split(".")[1:])
    return path.is_dir() or any(path.with_suffix(suffix).exists() for suffix in (".py", ".pyx"))


def test_layers_import_only_what_a_package_exports() -> None:
    wrong = []
    for module in modules(".py", ".pyx"):
        for line, origin, name in imports_between_layers(module):
            if not name:
                wrong.append(f"{module}:{line} imports {origin}: import from the package what is needed")
            elif SOURCE.joinpath(*origin.split(".")[1:]).is_dir():
                if name not in exports_of(SOURCE.joinpath(*origin.split(".")[1:])):
                    wrong.append(f"{module}:{line} imports {name}: {origin} does not export it")
            elif len(origin.split(".")) > 2 and origin.rpartition(".")[0] not in NAMESPACES:
                wrong.append(f"{module}:{line} imports {name} from the module {origin}: import it from its package")
    assert not wrong, "\n".join(wrong)


def test_packages_export_no_modules() -> None:
    """A module object lets other layers reach everything in it."""
    wrong = [
        f"{module}:{line} exports the module {origin}.{name}: export what others need of it"
        for module in modules(".py")
        if module.path.name == "__init__.py"
        for line, origin, name in _python_statements(module)
        if name in exports_of(module.path.parent)
        and origin.startswith("upriver.")
        and origin not in NAMESPACES
        and is_module(f"{origin}.{name}")
    ]
    assert not wrong, "\n".join(wrong)


def path_of_test(module: Module) -> Path:
    """``a/b.py`` is tested by ``a/test_b.py``, and its compiled twin ``a/_b.pyx`` too."""
    inside = module.path.relative_to(SOURCE)
    return TESTS / inside.parent / f"test_{inside.stem.lstrip('_')}.py"


def test_every_module_has_its_test_module() -> None:
    wrong = [
        f"{module} has no {expected.relative_to(ROOT)}"
        for module in modules(".py", ".pyx")
        if module.path.stem not in ("__init__", "__main__") and not (expected := path_of_test(module)).exists()
    ]
    assert not wrong, "\n".join(wrong)


def imports_of_tests(path: Path, seen: set[Path] | None = None) -> Iterator[str]:
    """Everything that a test module imports, itself or through other modules of the tests."""
    seen = {path} if seen is None else seen
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        yield from names
        for name in names:
            other = ROOT.joinpath(*name.split(".")).with_suffix(".py")
            if name.startswith("tests.") and other.exists() and other not in seen:
                seen.add(other)
                yield from imports_of_tests(other, seen)


def test_tests_of_the_protocol_need_no_node() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}: use tests/support/fake_node.py, or move the test to tests/node"
        for path in sorted((TESTS / "protocol").rglob("*.py"))
        for name in sorted(set(imports_of_tests(path)))
        if name.startswith(("upriver.node", "upriver.engine"))
    ]
    assert not wrong, "\n".join(wrong)


def test_every_public_class_and_function_says_what_it_is() -> None:
    wrong = [
        f"{module}:{node.lineno} {node.name} has no docstring"
        for module in modules(".py")
        for node in tree_of(module).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_module_says_what_it_is() -> None:
    wrong = [str(module) for module in modules(".py") if not ast.get_docstring(tree_of(module))]
    assert not wrong, f"without a docstring: {', '.join(wrong)}"


def test_every_function_can_be_seen_whole() -> None:
    wrong = [
        f"{module}:{node.lineno} {node.name} has {lines} lines, at most {FUNCTION_LINES_MAX} can be seen whole"
        for module in modules(".py")
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import os, upriver.node.server as s", ["os", "upriver.node.server"]),
        ("from upriver.engine import history", ["upriver.engine.history"]),
        ("from upriver import engine, node", ["upriver.engine", "upriver.node"]),
        ("from . import layout", ["upriver.wire.layout"]),
        ("from ..engine.history import History", ["upriver.engine.history.History"]),
        ("def late():\n    import socket", ["socket"]),
    ],
)
@pytest.mark.parametrize("suffix", [".py", ".pyx"])
def test_imports_are_found_wherever_they_hide(
    text: str, found: list[str], suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.SOURCE", tmp_path)
    path = tmp_path / "wire" / f"example{suffix}"
    path.parent.mkdir()
    path.write_text(text)
    assert [name for _, name in imports_of(Module(path))] == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import upriver.node.server", [("upriver.node.server", "")]),
        ("from upriver import node, wire", [("upriver.node", "")]),
        (
            "from upriver.node import (  # a note\n    start,\n    Node as N,\n)",
            [("upriver.node", "start"), ("upriver.node", "Node")],
        ),
        ("from upriver.wire.layout import Buffer", []),
        ("import os", []),
    ],
)
@pytest.mark.parametrize("suffix", [".py", ".pyx"])
def test_imports_between_layers_are_found(
    text: str, found: list[tuple[str, str]], suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.SOURCE", tmp_path)
    (tmp_path / "node").mkdir()
    path = tmp_path / "wire" / f"example{suffix}"
    path.parent.mkdir()
    path.write_text(text)
    assert [(origin, name) for _, origin, name in imports_between_layers(Module(path))] == found


def test_classes_of_compiled_modules_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.SOURCE", tmp_path)
    path = tmp_path / "_example.pyx"
    path.write_text("cdef class A:\n    pass\n\nclass B(A):\n    pass\n\ncdef struct C:\n    int a\n")
    assert classes_of(Module(path)) == ["A", "B"]


def test_cimports_are_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.SOURCE", tmp_path)
    path = tmp_path / "wire" / "_example.pyx"
    path.parent.mkdir()
    path.write_text(
        "# cython: language_level=3\nfrom libc.string cimport memcpy\ncimport upriver.engine.table._arena\n"
    )
    assert imports_of(Module(path)) == ((2, "libc.string.memcpy"), (3, "upriver.engine.table._arena"))
