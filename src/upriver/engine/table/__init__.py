"""The item table of a vbucket: records in chunks, an index by key, and the order of changes.

The table is compiled; there is no other one. `tests/engine/reference_table.py` says in plain Python what it does.
"""

from upriver.engine.table.group_format import group_parts
from upriver.engine.table.limits import KEY_BYTES_MAX, LOCKED_CAS, RELATIVE_EXPIRY_S_MAX, VALUE_BYTES_MAX, absolute
from upriver.errors import NotCompiled

try:
    from upriver.engine.table._table import Ledger, StoredItem, Table, collect, replay, stored_value
except ImportError as error:
    raise NotCompiled.after("upriver.engine.table._table", error) from None

__all__ = [
    "KEY_BYTES_MAX",
    "LOCKED_CAS",
    "RELATIVE_EXPIRY_S_MAX",
    "VALUE_BYTES_MAX",
    "Ledger",
    "StoredItem",
    "Table",
    "absolute",
    "collect",
    "group_parts",
    "replay",
    "stored_value",
]
