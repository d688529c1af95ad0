"""Fixtures of the client tests."""

from tests.support.guarded_node import guarded_node

__all__ = ["guarded_node"]
