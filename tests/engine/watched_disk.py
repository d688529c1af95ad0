"""Runs a piece of Python with a disk that is watched, or that fails, below LMDB: see watched_disk.c."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_watched(work: Path, script: str, *arguments: str, image: Path | None = None, full: Path | None = None) -> str:
    """What the script printed. ``image`` is kept as a power cut would leave the store; while ``full`` exists so is the
    disk."""
    compiler, library = shutil.which("cc"), work / "watched_disk.so"
    if compiler is None:
        pytest.skip("there is no C compiler")
    source = Path(__file__).with_suffix(".c")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    preloaded = [os.environ["LD_PRELOAD"]] if "LD_PRELOAD" in os.environ else []
    env = {**os.environ, "LD_PRELOAD": ":".join([*preloaded, str(library)])}
    if image is not None:
        env["UPRIVER_DISK_IMAGE"] = str(image)
    if full is not None:
        env["UPRIVER_DISK_FULL"] = str(full)
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, check=True, stdout=subprocess.PIPE, text=True, timeout=120).stdout
