"""Full scans of tables by Spark with Delta: ``$UPRIVER_DELTA_PYTHON -m bench.delta_scan TABLE…``.

The last words that it prints are the seconds of the fastest of several scans of each table, in turns.
"""

import sys
import time

from bench.delta_merge import session

#: The first one warms up.
ROUNDS = 6


def main(tables: list[str]) -> None:
    """Scan each table."""
    spark = session()
    spent: dict[str, list[float]] = {table: [] for table in tables}
    for _ in range(ROUNDS):
        for table in tables:
            started = time.perf_counter()
            columns = "count(*), sum(stock), max(length(text)), count(DISTINCT name)"
            spark.sql(f"SELECT {columns} FROM delta.`{table}`").collect()
            spent[table].append(time.perf_counter() - started)
    spark.stop()
    print(*(f"{min(each[1:]):.3f}" for each in spent.values()))


if __name__ == "__main__":
    main(sys.argv[1:])
