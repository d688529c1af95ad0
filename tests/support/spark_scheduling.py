"""Which of the parallel processes runs which test: everything that shares a Spark runs in one of them.

pytest-xdist's own groups do not work with pytest 9.2, which keeps the names of tests elsewhere; so whole files are told
apart by what is written in them.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

from xdist.scheduler import LoadScopeScheduling

_SHARES_SESSION = re.compile(r'\bspark: "?SparkSession\b|usefixtures\("spark"\)|getfixturevalue\("spark"\)')
_SHARES_SERVER = re.compile(r"\bconnect_server: ConnectServer\b")
_STARTS_SPARK = re.compile(r"\bmark\.spark\b")


class SparkScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """One unit of work for all files that share a Spark, one for each file that starts Spark processes of its own.

    Every other test is a unit by itself. The units with Spark are at the front of the queue. One process takes units
    from the front, the others take them from the back: so Spark starts first and is busy in one process only, tests of
    a module run one after the other, and the processes end together.
    """

    _is_sorted = False

    def _split_scope(self, nodeid: str) -> str:
        return _unit(self.config.rootpath / nodeid.partition("::")[0]) or nodeid

    def _assign_work_unit(self, node: Any) -> None:
        if not self._is_sorted:
            self._is_sorted = True
            for unit in [unit for unit in reversed(self.workqueue) if "::" not in unit]:
                self.workqueue.move_to_end(unit, last=False)
        if node is not next(iter(self.assigned_work)):
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0.0) -> None:
        super().mark_test_complete(node, item_index, duration)
        # With each test xdist looks at all units that a process ever got.
        units, unit = self.assigned_work[node], self._split_scope(self.registered_collections[node][item_index])
        if all(units[unit].values()):
            del units[unit]


@cache
def _unit(path: Path) -> str:
    text = path.read_text() if path.exists() else ""
    if _SHARES_SESSION.search(text):
        return "session"
    if _SHARES_SERVER.search(text):
        return "server"
    return str(path) if _STARTS_SPARK.search(text) else ""
