"""Upriver streams every change of a key-value store to its consumers."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("upriver")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
