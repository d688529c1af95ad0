"""The columnar codec: whole buffers of changes, records or requests at once, compiled or in plain Python.

Decoding gives Arrow record batches, encoding gives runs of packets. `row_layout` derives from the declared messages
where each column is, so that the compiled code knows no dialect by name.
"""

from upriver.wire.codec.bulk_requests import encode_reads, encode_writes, encode_writes_with_meta, key_vbuckets
from upriver.wire.codec.columns import ChangeBatch, ChangeDecoder, ChangeEncoder
from upriver.wire.codec.frame_runs import alike_run, change_run, changes_end, expired_as_deleted
from upriver.wire.codec.tap_records import (
    ACK,
    DELETE,
    FLAGS_OFFSET,
    MUTATION,
    NETWORK_BYTE_ORDER,
    NO_VALUE,
    Laid,
    inflated_records,
    lay_out,
)

__all__ = [
    "ACK",
    "DELETE",
    "FLAGS_OFFSET",
    "MUTATION",
    "NETWORK_BYTE_ORDER",
    "NO_VALUE",
    "ChangeBatch",
    "ChangeDecoder",
    "ChangeEncoder",
    "Laid",
    "alike_run",
    "change_run",
    "changes_end",
    "encode_reads",
    "encode_writes",
    "encode_writes_with_meta",
    "expired_as_deleted",
    "inflated_records",
    "key_vbuckets",
    "lay_out",
]
