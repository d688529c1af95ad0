from collections.abc import Sequence

import pyarrow as pa

from upriver.tables.schema import Column, Kind

LIMITS: dict[str, int]
KINDS: tuple[Kind, ...]

def parse_columns(
    values: pa.Array, columns: Sequence[Column]
) -> tuple[list[pa.Array], pa.Array, int, dict[str, dict[Kind, int]], list[str]]: ...
