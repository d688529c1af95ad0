"""Builds the compiled parts; where there is no C compiler the plain Python codec serves instead."""

import glob
import os
from typing import Any

from setuptools import Extension, setup

cythonize: Any
try:
    from Cython.Build import cythonize
except ImportError:  # a source tree without Cython still installs, without the compiled parts
    cythonize = None

SANITIZE = ["-fsanitize=address", "-g", "-O1"] if os.environ.get("UPRIVER_SANITIZE") else []

#: Each compiled module has a plain Python twin; a failed build is a warning, never an error.
COMPILED = {
    "upriver.wire.codec._columns": ["src/upriver/wire/codec/_columns.pyx"],
    "upriver.wire.codec._frame_runs": ["src/upriver/wire/codec/_frame_runs.pyx"],
    "upriver.wire.codec._tap_records": ["src/upriver/wire/codec/_tap_records.pyx"],
    "upriver.engine.table._table": ["src/upriver/engine/table/_table.pyx"],
    "upriver.node._fast_path": ["src/upriver/node/_fast_path.pyx"],
}

#: Files that the sources include: a change to one of them rebuilds.
INCLUDED = sorted(path for ending in ("pxd", "pxi", "h") for path in glob.glob(f"src/**/*.{ending}", recursive=True))


def extensions() -> list[Extension]:
    if cythonize is None:
        return []
    found = [
        Extension(
            name,
            sources,
            include_dirs=["src/upriver/engine/table"],
            depends=INCLUDED,
            extra_compile_args=["-O3", "-fno-strict-aliasing", *SANITIZE],
            extra_link_args=SANITIZE,
        )
        for name, sources in COMPILED.items()
        if all(os.path.exists(source) for source in sources)
    ]
    built = list(cythonize(found, language_level=3, include_path=["src"]))
    for extension in built:
        extension.optional = True  # cythonize makes new ones and forgets it
    return built


setup(ext_modules=extensions())
