"""Builds the compiled parts. A machine without a C compiler still gets the client; the node needs the compiler."""

import glob
import os
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

cythonize: Any
try:
    from Cython.Build import cythonize
except ImportError:  # a source tree without Cython still installs, without the compiled parts
    cythonize = None

SANITIZE = ["-fsanitize=address", "-g", "-O1"] if os.environ.get("UPRIVER_SANITIZE") else []

#: Parts with a slower twin in plain Python.
WITH_A_TWIN = {
    "upriver.tables.documents._parsing": "src/upriver/tables/documents/_parsing.pyx",
    "upriver.tables.keys._keys": "src/upriver/tables/keys/_keys.pyx",
    "upriver.wire.codec._columns": "src/upriver/wire/codec/_columns.pyx",
    "upriver.wire.codec._frame_runs": "src/upriver/wire/codec/_frame_runs.pyx",
    "upriver.wire.codec._tap_records": "src/upriver/wire/codec/_tap_records.pyx",
}
#: Parts that the node cannot do without.
FOR_THE_NODE = {
    "upriver.engine.table._table": "src/upriver/engine/table/_table.pyx",
    "upriver.node._fast_path": "src/upriver/node/_fast_path.pyx",
}
#: Files that the sources include: a change to one of them rebuilds.
INCLUDED = sorted(path for ending in ("pxd", "pxi", "h") for path in glob.glob(f"src/**/*.{ending}", recursive=True))


class BuildWhatCanBeBuilt(build_ext):  # type: ignore[misc, unused-ignore]
    """Says what a part that cannot be built is needed for; the installation goes on."""

    def build_extension(self, ext: Any) -> None:
        try:
            super().build_extension(ext)
        except Exception:
            self.warn(f"{ext.name} was not built: {consequence(ext.name)}")
            raise  # setuptools ignores it, because the extension is optional


def consequence(name: str) -> str:
    if name in FOR_THE_NODE:
        return "the client works, but a node will not start. Install a C compiler and reinstall to run one"
    return "plain Python does the same, more slowly"


def extensions() -> list[Extension]:
    if cythonize is None:
        return []
    found = [
        Extension(
            name,
            [source],
            include_dirs=["src/upriver/engine/table"],
            depends=INCLUDED,
            extra_compile_args=["-O3", "-fno-strict-aliasing", *SANITIZE],
            extra_link_args=SANITIZE,
        )
        for name, source in {**WITH_A_TWIN, **FOR_THE_NODE}.items()
        if os.path.exists(source)
    ]
    built = list(cythonize(found, language_level=3, include_path=["src"]))
    for extension in built:
        extension.optional = True  # cythonize makes new ones and forgets it
    return built


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildWhatCanBeBuilt})
