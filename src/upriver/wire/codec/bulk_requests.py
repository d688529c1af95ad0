"""Encode batches of requests: rows of documents become the packets that store or delete them.

The same loops encode bulk requests and the changes of a stream, driven by a table of column offsets.
"""

from functools import cache
from types import ModuleType
from typing import Final

import pyarrow as pa

from upriver.model import CHANGES, Event
from upriver.wire.codec.columns import _codec
from upriver.wire.codec.row_layout import FieldPlace, RowLayout, RowTemplate
from upriver.wire.dialects.memcached import DeleteQ, DeleteQWithMeta, GetQ, MetaOption, SetQ, SetQWithMeta
from upriver.wire.fields import UInt
from upriver.wire.framing import MEMCACHED
from upriver.wire.message import Request

#: The column that fills each field. The CAS in a request's header is a condition and stays 0.
_COLUMNS: Final = {"flags": "flags", "expiration": "expiry", "rev_seqno": "rev_seqno", "item_cas": "cas"}
_HEADER: Final = {"vbucket": "vbucket", "opaque": "opaque", "data type": "datatype"}


def _template(example: Request, event: Event) -> RowTemplate:
    """The table for requests like this sample, which has no key and no value."""
    message, head = type(example), example.encode()
    fixed_length = len(head) - MEMCACHED.header_size
    places = {
        _HEADER[field.name]: FieldPlace(field.first, field.size)
        for field in MEMCACHED.request_fields
        if field.name in _HEADER
    }
    for field, offset, size in message.layout.parts[fixed_length].offsets():
        if field.name in _COLUMNS and isinstance(field.kind, UInt):
            places[_COLUMNS[field.name]] = FieldPlace(MEMCACHED.header_size + offset, size)
    layout = RowLayout(
        message=message,
        event=event,
        opcode=message.declaration.opcode,
        extras_length=fixed_length,
        fixed_length=fixed_length,
        places=places,
        private=None,
        trailer=None,
        has_value=message.layout.has_value,
    )
    return RowTemplate(layout, head, vbucket_varies=True)


@cache
def _plain() -> dict[Event, RowTemplate]:
    deletion = _template(DeleteQ(key=b""), Event.DELETION)
    return {
        Event.MUTATION: _template(SetQ(key=b""), Event.MUTATION),
        Event.DELETION: deletion,
        Event.EXPIRATION: deletion,
    }


@cache
def _with_meta(options: MetaOption | None) -> dict[Event, RowTemplate]:
    expired = MetaOption.DELETE_IS_EXPIRATION | (options or MetaOption(0))
    deletion = _template(DeleteQWithMeta(key=b"", options=options), Event.DELETION)
    # A deletion carries no value.
    return {
        Event.MUTATION: _template(SetQWithMeta(key=b"", options=options), Event.MUTATION),
        Event.DELETION: deletion,
        Event.EXPIRATION: _template(DeleteQWithMeta(key=b"", options=expired), Event.EXPIRATION),
    }


@cache
def _reads() -> dict[Event, RowTemplate]:
    reading = _template(GetQ(key=b""), Event.MUTATION)
    return dict.fromkeys((Event.MUTATION, Event.DELETION, Event.EXPIRATION), reading)


def encode_writes(batch: pa.RecordBatch, first_opaque: int, *, codec: ModuleType = _codec) -> bytes | pa.Buffer:
    """Quiet sets and deletes, one for each row, numbered from ``first_opaque``: only refusals are answered."""
    return _encode(batch, _plain(), first_opaque, codec)


def encode_writes_with_meta(
    batch: pa.RecordBatch, first_opaque: int, options: MetaOption | None = None, *, codec: ModuleType = _codec
) -> bytes | pa.Buffer:
    """Quiet writes that keep revision and CAS, one for each row: only refusals are answered."""
    return _encode(batch, _with_meta(options), first_opaque, codec)


def encode_reads(batch: pa.RecordBatch, first_opaque: int, *, codec: ModuleType = _codec) -> bytes | pa.Buffer:
    """Quiet gets of the batch's keys: only existing keys are answered."""
    return _encode(batch, _reads(), first_opaque, codec, keys_only=True)


def key_vbuckets(keys: pa.BinaryArray, vbuckets: int, *, codec: ModuleType = _codec) -> pa.UInt16Array:
    """The vbucket of each key, in a bucket with this number of vbuckets."""
    found: pa.UInt16Array = codec.key_vbuckets(keys, vbuckets)
    return found


def _encode(
    batch: pa.RecordBatch,
    templates: dict[Event, RowTemplate],
    first_opaque: int,
    codec: ModuleType,
    *,
    keys_only: bool = False,
) -> bytes | pa.Buffer:
    if batch.schema != CHANGES:
        batch = batch.select(CHANGES.names).cast(CHANGES)
    data: bytes | pa.Buffer = codec.write_rows(
        batch, templates, opaque=first_opaque, opaque_step=1, keys_only=keys_only
    )
    return data
