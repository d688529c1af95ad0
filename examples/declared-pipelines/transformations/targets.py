"""A table, an index, a second cluster and counts, all fed by the changes of one cluster."""

import os

from upriver.pipelines import declare

SOURCE, COPY, TARGETS = (os.environ[name] for name in ("SOURCE", "COPY", "TARGETS"))

declare("mirror", {"from": SOURCE, "to": f"{TARGETS}/table"})
declare("index", {"from": SOURCE, "to": f"{TARGETS}/index.db"})
declare("replicate", {"from": SOURCE, "to": COPY})
declare("observe", {"from": SOURCE, "to": f"{TARGETS}/seen", "window": "1s", "late": "0s"})
