"""The columnar codec: whole buffers of changes, records or requests at once, compiled or in plain Python.

Decoding gives Arrow record batches, encoding gives runs of packets. `row_layout` derives from the declared messages
where each column is, so that the compiled code knows no dialect by name.
"""

from upriver.wire.codec import columns, frame_runs, tap_records
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
    "compiled_codecs",
    "encode_reads",
    "encode_writes",
    "encode_writes_with_meta",
    "expired_as_deleted",
    "inflated_records",
    "key_vbuckets",
    "lay_out",
]


def compiled_codecs() -> dict[str, bool]:
    """Each part of the codec that can be compiled, and whether its compiled form is in use."""
    return {
        "columnar codec": columns.CODEC == "compiled",
        "frames": frame_runs.change_run is not frame_runs.plain_change_run,
        "tap records": tap_records.lay_out is not tap_records.plain_lay_out,
    }
