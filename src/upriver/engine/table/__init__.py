"""The item table of a vbucket: records in chunks, an index by key, and the order of changes."""

from upriver.engine.table.plain_table import KEY_BYTES_MAX, RELATIVE_EXPIRY_S_MAX

__all__ = [
    "KEY_BYTES_MAX",
    "RELATIVE_EXPIRY_S_MAX",
]
