"""Which of the parallel processes runs which test: everything that shares the Spark session runs in one of them.

pytest-xdist's own groups do not work with pytest 9.2, which keeps the names of tests elsewhere; so whole files are told
apart by what is written in them.
"""

import re
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

_SHARES_SESSION = re.compile(r'\bspark: "?SparkSession\b|usefixtures\("spark"\)|getfixturevalue\("spark"\)')
_STARTS_SPARK = re.compile(r"\bmark\.spark\b")


class SparkScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """One unit of work for all files that use the session, one for each file that starts Spark processes of its own.

    Every other test is a unit by itself. The largest units are distributed first.
    """

    def _split_scope(self, nodeid: str) -> str:
        return _unit(self.config.rootpath / nodeid.partition("::")[0]) or nodeid


@cache
def _unit(path: Path) -> str:
    text = path.read_text() if path.exists() else ""
    if _SHARES_SESSION.search(text):
        return "spark"
    return str(path) if _STARTS_SPARK.search(text) else ""
