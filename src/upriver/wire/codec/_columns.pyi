from collections.abc import Iterable, Mapping

import pyarrow as pa

from upriver.model import Event
from upriver.wire.codec.row_layout import RowLayout, RowTemplate
from upriver.wire.layout import Buffer

class RowReader:
    def __init__(
        self,
        layouts: Iterable[RowLayout],
        records_schema: pa.Schema,
        transport_schema: pa.Schema,
        body_bytes_max: int,
    ) -> None: ...
    def read(
        self, head: bytes, data: Buffer, start: int, rows_max: int, bytes_max: int
    ) -> tuple[int, int, pa.RecordBatch | None, pa.RecordBatch | None]: ...

def key_vbuckets(keys: pa.BinaryArray, vbuckets: int) -> pa.UInt16Array: ...
def write_rows(
    batch: pa.RecordBatch,
    templates: Mapping[Event, RowTemplate],
    *,
    opaque: int,
    opaque_step: int,
    keys_only: bool,
) -> pa.Buffer | bytes: ...
