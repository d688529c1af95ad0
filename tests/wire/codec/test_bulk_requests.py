"""Batches of requests, by both codecs, against the declared messages."""

from types import ModuleType

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.model import Change, Event, change_batch, vbucket_of
from upriver.wire import Framer, Message, memcached
from upriver.wire.codec import plain_columns
from upriver.wire.codec.bulk_requests import encode_reads, encode_writes, encode_writes_with_meta, key_vbuckets
from upriver.wire.codec.columns import CODEC, _codec
from upriver.wire.dialects.memcached import MetaOption
from upriver.wire.framing import MEMCACHED

CODECS = [plain_columns, *([_codec] if CODEC == "compiled" else [])]
u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
changes = st.builds(
    Change,
    vbucket=st.integers(0, 1023),
    event=st.sampled_from([Event.MUTATION, Event.DELETION, Event.EXPIRATION]),
    seqno=u64,
    rev_seqno=u64,
    cas=u64,
    flags=u32,
    expiry=u32,
    datatype=st.integers(0, 255),
    key=st.binary(min_size=1, max_size=250),
    value=st.binary(max_size=100),
)


def decoded(data: bytes | pa.Buffer) -> list[Message]:
    framer = Framer(MEMCACHED)
    framer.feed(bytes(data))
    return [memcached.memcached.decode(packet) for packet in iter(framer.next_packet, None)]


@pytest.mark.parametrize("codec", CODECS)
@given(rows=st.lists(changes, max_size=5), first=st.integers(1, 1000))
def test_quiet_writes(codec: ModuleType, rows: list[Change], first: int) -> None:
    expected: list[Message] = []
    for opaque, row in enumerate(rows, first):
        head = {"vbucket": row.vbucket, "opaque": opaque, "datatype": row.datatype, "key": row.key}
        if row.event is Event.MUTATION:
            expected.append(memcached.SetQ(value=row.value, flags=row.flags, expiration=row.expiry, **head))  # type: ignore[arg-type]
        else:
            expected.append(memcached.DeleteQ(**head))  # type: ignore[arg-type]
    assert decoded(encode_writes(change_batch(rows), first, codec=codec)) == expected


@pytest.mark.parametrize("codec", CODECS)
@given(rows=st.lists(changes, max_size=5), options=st.sampled_from([None, MetaOption.FORCE_ACCEPT]))
def test_writes_with_meta(codec: ModuleType, rows: list[Change], options: MetaOption | None) -> None:
    sent = decoded(encode_writes_with_meta(change_batch(rows), 7, options, codec=codec))
    kinds = {
        Event.MUTATION: memcached.SetQWithMeta,
        Event.DELETION: memcached.DeleteQWithMeta,
        Event.EXPIRATION: memcached.DeleteQWithMeta,
    }
    assert [type(message) for message in sent] == [kinds[row.event] for row in rows]
    for message, row in zip(sent, rows, strict=True):
        assert isinstance(message, memcached.SetWithMeta)
        assert (message.vbucket, message.key, message.value) == (row.vbucket, row.key, row.value)
        assert (message.rev_seqno, message.item_cas, message.flags) == (row.rev_seqno, row.cas, row.flags)
        assert (message.expiration, message.cas) == (row.expiry, 0)
        expired = MetaOption.DELETE_IS_EXPIRATION if row.event is Event.EXPIRATION else MetaOption(0)
        assert (message.options or MetaOption(0)) == (options or MetaOption(0)) | expired


@pytest.mark.parametrize("codec", CODECS)
def test_quiet_reads_carry_keys_alone(codec: ModuleType) -> None:
    rows = [Change(vbucket=n, event=Event.MUTATION, seqno=0, key=b"k%d" % n, value=b"v") for n in range(3)]
    assert decoded(encode_reads(change_batch(rows), 5, codec=codec)) == [
        memcached.GetQ(vbucket=n, opaque=5 + n, key=b"k%d" % n) for n in range(3)
    ]


@pytest.mark.parametrize("codec", CODECS)
@given(keys=st.lists(st.binary(max_size=40)), vbuckets=st.integers(1, 1024), first=st.integers(0, 3))
def test_vbuckets_of_keys(codec: ModuleType, keys: list[bytes], vbuckets: int, first: int) -> None:
    found = key_vbuckets(pa.array(keys, pa.binary()).slice(first), vbuckets, codec=codec)
    assert found.type == pa.uint16()
    assert found.to_pylist() == [vbucket_of(key, vbuckets) for key in keys[first:]]


@pytest.mark.parametrize("codec", CODECS)
def test_a_bucket_has_vbuckets(codec: ModuleType) -> None:
    with pytest.raises(ValueError, match="at least one vbucket"):
        key_vbuckets(pa.array([b"k"], pa.binary()), 0, codec=codec)


def test_other_schemas_are_converted_or_refused() -> None:
    batch = change_batch([Change(vbucket=1, event=Event.MUTATION, seqno=0, key=b"k")])
    wide = batch.set_column(0, "vbucket", batch.column("vbucket").cast(pa.int64()))
    assert bytes(encode_writes(wide, 1)) == bytes(encode_writes(batch, 1))
    with pytest.raises(KeyError):
        encode_writes(batch.drop_columns(["key"]), 1)
