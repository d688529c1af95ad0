"""Which item table serves: the compiled one, or the plain one where no compiler was or it is asked for.

``UPRIVER_PLAIN=1`` in the environment forces the plain one.
"""

import os
from typing import TYPE_CHECKING

COMPILED = False

if TYPE_CHECKING:
    from upriver.engine.table.plain_table import Ledger, StoredItem, Table, collect, replay, stored_value
else:
    try:
        if os.environ.get("UPRIVER_PLAIN"):
            raise ImportError
        from upriver.engine.table._table import Ledger, StoredItem, Table, collect, replay, stored_value

        COMPILED = True
    except ImportError:
        from upriver.engine.table.plain_table import Ledger, StoredItem, Table, collect, replay, stored_value

__all__ = ["COMPILED", "Ledger", "StoredItem", "Table", "collect", "replay", "stored_value"]
