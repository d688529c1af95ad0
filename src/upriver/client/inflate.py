"""Batches of changes whose values come compressed."""

import pyarrow as pa
import pyarrow.compute as pc

from upriver.model.compression import INFLATED_BYTES_MAX, SNAPPY, inflated


def inflated_batch(records: pa.RecordBatch, limit: int = INFLATED_BYTES_MAX) -> pa.RecordBatch:
    """A batch of changes in which no value is compressed any more."""
    if "datatype" not in records.schema.names:
        return records
    compressed = pc.bit_wise_and(records.column("datatype"), pa.scalar(SNAPPY, pa.uint8()))
    if not pc.max(compressed).as_py():
        return records
    datatypes = records.column("datatype").to_pylist()
    values = [
        inflated(value, limit) if datatype & SNAPPY else value
        for datatype, value in zip(datatypes, records.column("value").to_pylist(), strict=True)
    ]
    plain = pa.array([datatype & ~SNAPPY for datatype in datatypes], pa.uint8())
    for name, column in (("value", pa.array(values, pa.binary())), ("datatype", plain)):
        place = records.schema.get_field_index(name)
        records = records.set_column(place, records.schema.field(place), column)
    return records
