"""The compiled twin has the names and types of the plain one."""

from upriver.engine.table.plain_table import Ledger as Ledger
from upriver.engine.table.plain_table import StoredItem as StoredItem
from upriver.engine.table.plain_table import Table as Table
from upriver.engine.table.plain_table import collect as collect
from upriver.engine.table.plain_table import replay as replay
from upriver.engine.table.plain_table import stored_value as stored_value
