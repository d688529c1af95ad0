"""The memcached commands: all that the node will need are there, with the bytes that clients send."""

from typing import Any

import pytest

from upriver.errors import WireError
from upriver.wire import Message, Request, Response
from upriver.wire import memcached as m
from upriver.wire.codes import Status
from upriver.wire.dialects.memcached import memcached

#: Every command that the node answers, by its number.
COMMANDS = {
    0x00: "get",
    0x01: "set",
    0x02: "add",
    0x03: "replace",
    0x04: "delete",
    0x05: "increment",
    0x06: "decrement",
    0x07: "quit",
    0x08: "flush",
    0x09: "get q",
    0x0A: "noop",
    0x0B: "version",
    0x0C: "get k",
    0x0D: "get k q",
    0x0E: "append",
    0x0F: "prepend",
    0x10: "stat",
    0x11: "set q",
    0x12: "add q",
    0x13: "replace q",
    0x14: "delete q",
    0x15: "increment q",
    0x16: "decrement q",
    0x17: "quit q",
    0x18: "flush q",
    0x19: "append q",
    0x1A: "prepend q",
    0x1B: "verbosity",
    0x1C: "touch",
    0x1D: "gat",
    0x1E: "gat q",
    0x1F: "hello",
    0x20: "sasl list mechanisms",
    0x21: "sasl auth",
    0x22: "sasl step",
    0x3D: "set vbucket",
    0x3E: "get vbucket",
    0x3F: "delete vbucket",
    0x48: "get all vbucket seqnos",
    0x80: "stop persistence",
    0x81: "start persistence",
    0x87: "list buckets",
    0x89: "select bucket",
    0x91: "observe seqno",
    0x92: "observe",
    0x94: "get locked",
    0x95: "unlock",
    0x96: "get failover log",
    0x97: "last closed checkpoint",
    0x9E: "deregister tap client",
    0xA0: "get meta",
    0xA2: "set with meta",
    0xA3: "set q with meta",
    0xA8: "delete with meta",
    0xA9: "delete q with meta",
    0xAA: "create checkpoint",
    0xB4: "set cluster config",
    0xB5: "get cluster config",
    0xB7: "seqno persistence",
    0xFE: "get error map",
}
#: Answers that carry more than a status.
ANSWERS = {
    0x00, 0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x09, 0x0B, 0x0C, 0x0D, 0x0E, 0x0F, 0x10, 0x1C, 0x1D, 0x1E, 0x1F, 0x20,
    0x21, 0x22, 0x3E, 0x48, 0x87, 0x91, 0x92, 0x94, 0x96, 0x97, 0xA0, 0xA2, 0xA8, 0xAA, 0xB5, 0xFE,
}  # fmt: skip
#: Extras of the requests that have any.
EXTRAS = {
    0x01: (8,), 0x02: (8,), 0x03: (8,), 0x11: (8,), 0x12: (8,), 0x13: (8,),
    0x05: (20,), 0x06: (20,), 0x15: (20,), 0x16: (20,),
    0x08: (0, 4), 0x18: (0, 4), 0x1B: (4,), 0x1C: (4,), 0x1D: (4,), 0x1E: (4,), 0x94: (0, 4),
    0x3D: (4,), 0x48: (0, 4), 0xB7: (8,),
    0xA0: (0, 1), 0xA2: (24, 26, 28, 30), 0xA3: (24, 26, 28, 30), 0xA8: (24, 26, 28, 30),
    0xA9: (24, 26, 28, 30), 0xB4: (0, 16), 0xB5: (0, 16),
}  # fmt: skip


def test_every_command_that_the_node_needs_is_declared() -> None:
    declared = {cls.declaration.opcode: cls.title() for cls in memcached.messages if issubclass(cls, Request)}
    assert declared == COMMANDS


def test_every_answer_with_a_body_is_declared() -> None:
    assert {cls.declaration.opcode for cls in memcached.messages if issubclass(cls, Response)} == ANSWERS


def test_extras_have_the_sizes_that_clients_send() -> None:
    requests = [cls for cls in memcached.messages if issubclass(cls, Request)]
    assert {cls.declaration.opcode: cls.layout.lengths for cls in requests if cls.layout.lengths != (0,)} == EXTRAS


@pytest.mark.parametrize(
    ("message", "extras", "key", "value"),
    [
        (m.Set(flags=1, expiration=2, key=b"k", value=b"v"), "00000001 00000002", b"k", b"v"),
        (
            m.Increment(delta=1, initial=2, expiration=3, key=b"k"),
            "0000000000000001 0000000000000002 00000003",
            b"k",
            b"",
        ),
        (m.IncrementResponse(number=5), "", b"", b"\0\0\0\0\0\0\0\x05"),
        (m.SetResponse(vbucket_uuid=1, seqno=2), "0000000000000001 0000000000000002", b"", b""),
        (m.GetKResponse(flags=1, key=b"k", value=b"v"), "00000001", b"k", b"v"),
        (m.Touch(expiration=9, key=b"k"), "00000009", b"k", b""),
        (m.GetLocked(lock_time=15, key=b"k"), "0000000f", b"k", b""),
        (m.Hello(agent=b"me", features=(m.Feature.XERROR, m.Feature(0x99))), "", b"me", b"\0\x07\0\x99"),
        (m.SetVbucket(state=m.VbucketState.REPLICA), "00000002", b"", b""),
        (m.GetVbucketResponse(state=m.VbucketState.PENDING), "", b"", b"\0\0\0\x03"),
        (m.SeqnoPersistence(seqno=7), "0000000000000007", b"", b""),
        (m.GetErrorMap(version=2), "", b"", b"\0\x02"),
        (m.LastClosedCheckpointResponse(checkpoint=3), "", b"", b"\0\0\0\0\0\0\0\x03"),
        (
            m.CreateCheckpointResponse(checkpoint=3, persisted_checkpoint=2),
            "",
            b"",
            b"\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0\x02",
        ),
        (m.ObserveSeqno(vbucket_uuid=1), "", b"", b"\0\0\0\0\0\0\0\x01"),
        (m.Observe(keys=(m.ObservedKey(vbucket=5, key=b"key"),)), "", b"", b"\0\x05\0\x03key"),
        (
            m.ObserveResponse(keys=(m.KeyObservation(vbucket=5, key=b"key", state=m.KeyState.PERSISTED, cas=9),)),
            "",
            b"",
            b"\0\x05\0\x03key\x01\0\0\0\0\0\0\0\x09",
        ),
        (
            m.GetMetaResponse(deleted=1, flags=2, expiration=3, rev_seqno=4),
            "00000001 00000002 00000003 0000000000000004",
            b"",
            b"",
        ),
        (m.SelectBucket(name=b"default"), "", b"default", b""),
        (m.SaslAuth(mechanism=b"PLAIN", value=b"\0u\0p"), "", b"PLAIN", b"\0u\0p"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Message) else "",
)
def test_fields_stand_where_clients_put_them(message: Message, extras: str, key: bytes, value: bytes) -> None:
    packet, fixed = message.encode(), bytes.fromhex(extras)
    assert packet[24:] == fixed + key + value
    assert (packet[4], int.from_bytes(packet[2:4], "big")) == (len(fixed), len(key))
    assert memcached.decode(packet) == message


@pytest.mark.parametrize(
    ("message", "extras"),
    [
        (m.SetWithMeta(flags=1, expiration=2, rev_seqno=3, item_cas=4, key=b"k", value=b"v"), 24),
        (m.SetWithMeta(key=b"k", value=b"v", meta=b"m"), 26),
        (m.SetWithMeta(key=b"k", value=b"v", options=m.MetaOption.FORCE_ACCEPT), 28),
        (m.SetWithMeta(key=b"k", value=b"v", options=m.MetaOption(0), meta=b"m"), 30),
        (m.DeleteWithMeta(key=b"k", options=m.MetaOption.DELETE_IS_EXPIRATION), 28),
    ],
)
def test_the_extras_of_with_meta_are_as_long_as_they_must_be(message: Message, extras: int) -> None:
    assert message.encode()[4] == extras
    assert memcached.decode(message.encode()) == message


def test_extras_of_with_meta_that_count_no_metadata_are_taken_too() -> None:
    body = bytes(26)
    packet = bytes.fromhex("80a20001 1a000000 0000001b 00000000 00000000 00000000") + body + b"k"
    assert memcached.decode(packet) == m.SetWithMeta(key=b"k")


@pytest.mark.parametrize("cls", [m.SetVbucket, m.SeqnoPersistence])
def test_a_number_that_clients_put_into_the_value_is_taken_from_there(cls: type[Message]) -> None:
    name = cls.layout.fields[0].name
    message = cls(**{name: 2})
    packet = bytearray(message.encode())
    assert packet[4] == cls.layout.lengths[0]
    packet[4] = 0
    assert memcached.decode(packet) == message


def test_after_a_failover_an_observed_seqno_has_two_numbers_more() -> None:
    common: dict[str, Any] = {"vbucket": 1, "vbucket_uuid": 2, "persisted_seqno": 3, "current_seqno": 4}
    plain = m.ObserveSeqnoResponse(**common)
    failed_over = m.ObserveSeqnoResponse(format=m.ObserveFormat.FAILED_OVER, **common, old_vbucket_uuid=5, last_seqno=6)
    body = "0001 0000000000000002 0000000000000003 0000000000000004"
    assert plain.encode()[24:] == bytes.fromhex("00" + body)
    assert failed_over.encode()[24:] == bytes.fromhex("01" + body + "0000000000000005 0000000000000006")
    for message in (plain, failed_over):
        assert memcached.decode(message.encode()) == message


def test_a_failed_over_answer_that_is_too_short_is_refused() -> None:
    packet = bytearray(m.ObserveSeqnoResponse(vbucket=1, vbucket_uuid=2, persisted_seqno=3, current_seqno=4).encode())
    packet[24] = 1
    with pytest.raises(WireError) as caught:
        memcached.decode(packet)
    assert str(caught.value) == "at byte 51: expected 8 bytes of old_vbucket_uuid, found 0"


def test_a_login_that_goes_on_has_the_same_answer_as_one_that_is_done() -> None:
    challenge = m.SaslAuthResponse(status=Status.AUTH_CONTINUE, value=b"challenge")
    assert memcached.decode(challenge.encode()) == challenge
    assert m.SaslAuthResponse().status is Status.SUCCESS


def test_states_are_numbered_otherwise_than_in_the_upr_texts() -> None:
    assert {state.name: int(state) for state in m.VbucketState} == {"ACTIVE": 1, "REPLICA": 2, "PENDING": 3, "DEAD": 4}


def test_quiet_commands_are_classes_of_their_own() -> None:
    quiet, loud = m.SetQ(key=b"k"), m.Set(key=b"k")
    assert quiet != loud
    assert type(memcached.decode(quiet.encode())) is m.SetQ
