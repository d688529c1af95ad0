"""The dialects, one module per protocol text: every message that the text describes, declared once.

``DIALECTS`` lists them by name. `memcached` holds the commands that a node answers beside its streams.
"""

from upriver.wire.dialect import Dialect
from upriver.wire.dialects import dcp, memcached, tap, upr, upr_draft1, upr_draft2, upr_draft3

#: Every dialect by name.
DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        memcached.memcached,
        tap.tap,
        upr_draft1.upr_draft1,
        upr_draft2.upr_draft2,
        upr_draft3.upr_draft3,
        upr.upr,
        dcp.dcp,
    )
}

__all__ = ["DIALECTS", "dcp", "memcached", "tap", "upr", "upr_draft1", "upr_draft2", "upr_draft3"]
