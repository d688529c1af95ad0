"""TAP: connect options in the order of their flags, and the engine-private part between extras and key."""

from typing import Any

import pytest

from upriver.errors import WireError
from upriver.wire import Message, Request, tap
from upriver.wire.codes import Status
from upriver.wire.dialects.memcached import VbucketState

#: Opcode and length of extras, as in the header; then the lengths with the engine-private part.
DECLARED = {
    (0x40, (4, 0)): tap.Connect,
    (0x41, (16,)): tap.Mutation,
    (0x42, (8,)): tap.Delete,
    (0x43, (8,)): tap.Flush,
    (0x44, (8,)): tap.Opaque,
    (0x45, (8,)): tap.SetVbucket,
    (0x46, (8,)): tap.CheckpointStart,
    (0x47, (8,)): tap.CheckpointEnd,
    (0x46, (16,)): tap.NamedCheckpointStart,
    (0x47, (16,)): tap.NamedCheckpointEnd,
}
WITH_PRIVATE = {
    tap.Connect: (4, 0),
    tap.Mutation: (16, 24, 25),
    tap.Delete: (8, 16),
    tap.Flush: (8,),
    tap.Opaque: (8, 12),
    tap.SetVbucket: (12,),
    tap.CheckpointStart: (8, 16),
    tap.CheckpointEnd: (8, 16),
    tap.NamedCheckpointStart: (16, 24),
    tap.NamedCheckpointEnd: (16, 24),
}


def test_every_opcode_of_the_text_is_declared() -> None:
    assert {(cls.declaration.opcode, cls.layout.extras_lengths): cls for cls in tap.tap.messages} == DECLARED
    assert {cls: cls.layout.lengths for cls in tap.tap.messages} == WITH_PRIVATE


def test_options_follow_the_name_in_the_order_of_their_flags() -> None:
    flags = tap.ConnectFlag
    message = tap.Connect(
        flags=flags.BACKFILL | flags.LIST_VBUCKETS | flags.CHECKPOINT,
        name=b"node",
        backfill_date=5,
        vbuckets=(1, 2),
        checkpoints=(tap.VbucketCheckpoint(vbucket=1, checkpoint=9),),
    )
    packet = message.encode()
    assert packet[24:] == bytes.fromhex("00000045") + b"node" + bytes.fromhex(
        "0000000000000005 0002 0001 0002 0001 0001 0000000000000009"
    )
    assert tap.tap.decode(packet) == message


@pytest.mark.parametrize(
    "message",
    [
        tap.Connect(flags=tap.ConnectFlag.BACKFILL),
        tap.Connect(backfill_date=5),
        tap.Connect(flags=tap.ConnectFlag.LIST_VBUCKETS),
        tap.Connect(vbuckets=()),
    ],
)
def test_an_option_without_its_flag_is_not_sent(message: tap.Connect) -> None:
    with pytest.raises(ValueError, match="contradict each other"):
        message.encode()


def test_an_empty_list_of_vbuckets_is_still_a_list() -> None:
    message = tap.Connect(flags=tap.ConnectFlag.LIST_VBUCKETS, vbuckets=())
    assert message.encode()[24:] == bytes.fromhex("00000004 0000")
    assert tap.tap.decode(message.encode()) == message


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({}, ""),
        ({"closed_only": 1}, "01"),
        ({"checkpoints": ()}, "0000"),
        ({"checkpoints": (), "closed_only": 1}, "0000 01"),
    ],
    ids=str,
)
def test_tools_leave_out_checkpoints_and_ask_for_closed_ones_only(options: dict[str, Any], value: str) -> None:
    flags = tap.ConnectFlag.CHECKPOINT | tap.ConnectFlag.REGISTERED_CLIENT
    message = tap.Connect(flags=flags, name=b"backup", **options)
    assert message.encode()[28:] == b"backup" + bytes.fromhex(value)
    assert tap.tap.decode(message.encode()) == message


@pytest.mark.parametrize("flag", [tap.ConnectFlag.CHECKPOINT, tap.ConnectFlag.REGISTERED_CLIENT])
def test_what_may_be_left_out_leaves_nothing_over(flag: tap.ConnectFlag) -> None:
    packet = bytearray(tap.Connect(flags=flag, name=b"n").encode() + b"\0\0\0")
    packet[11] += 3
    with pytest.raises(WireError, match="expected the end of Connect"):
        tap.tap.decode(packet)


def test_a_connect_without_flags_may_leave_them_out() -> None:
    packet = bytes.fromhex("80400004 00000000 00000004 00000000 00000000 00000000") + b"node"
    assert tap.tap.decode(packet) == tap.Connect(name=b"node")


def test_options_that_do_not_fit_the_flags_are_refused() -> None:
    packet = bytearray(tap.Connect(name=b"n").encode() + bytes(8))
    packet[11] += 8
    with pytest.raises(WireError) as caught:
        tap.tap.decode(packet)
    assert str(caught.value) == "at byte 29: expected the end of Connect, found 8 more bytes"
    packet[27] = tap.ConnectFlag.BACKFILL
    assert tap.tap.decode(packet) == tap.Connect(flags=tap.ConnectFlag.BACKFILL, name=b"n", backfill_date=0)


@pytest.mark.parametrize(
    ("message", "private"),
    [
        (tap.Mutation(key=b"k", value=b"v"), ""),
        (tap.Mutation(key=b"k", value=b"v", rev_seqno=3), "0000000000000003"),
        (tap.Mutation(key=b"k", value=b"v", rev_seqno=3, nru=2), "0000000000000003 02"),
    ],
)
def test_a_mutation_may_carry_its_revision_between_extras_and_key(message: tap.Mutation, private: str) -> None:
    packet, engine = message.encode(), bytes.fromhex(private)
    assert packet[4] == 16
    assert message.private_length == int.from_bytes(packet[24:26], "big") == len(engine)
    assert packet[40:] == engine + b"kv"
    assert tap.tap.decode(packet) == message


@pytest.mark.parametrize(
    ("message", "private"),
    [
        (tap.Delete(key=b"k"), ""),
        (tap.Delete(key=b"k", rev_seqno=3), "0000000000000003"),
        (tap.Opaque(control=tap.Control.OPEN_CHECKPOINT), "00000003"),
        (tap.SetVbucket(state=VbucketState.PENDING), "00000003"),
        (tap.CheckpointStart(checkpoint=250), "00000000000000fa"),
        (tap.CheckpointEnd(checkpoint=250), "00000000000000fa"),
        (tap.Flush(), ""),
    ],
)
def test_every_other_message_has_its_data_behind_eight_bytes(message: Message, private: str) -> None:
    packet, engine = message.encode(), bytes.fromhex(private)
    assert packet[4] == 8
    assert packet[24:32] == len(engine).to_bytes(2, "big") + bytes.fromhex("0000 ff 000000")
    assert packet[32 : 32 + len(engine)] == engine
    assert tap.tap.decode(packet) == message


def test_a_revision_is_needed_before_what_follows_it() -> None:
    with pytest.raises(ValueError, match="no fixed part"):
        tap.Mutation(key=b"k", nru=2).encode()


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 10, 16, 300])
@pytest.mark.parametrize(
    "message",
    [
        tap.Mutation(key=b"k", value=b"v", flags=7),
        tap.Delete(key=b"k"),
        tap.Flush(),
        tap.Opaque(),
        tap.CheckpointStart(),
        tap.CheckpointEnd(),
        tap.NamedCheckpointStart(checkpoint=5),
    ],
    ids=lambda message: message.title(),
)
def test_an_engine_private_part_of_any_length_is_skipped(message: Request, length: int) -> None:
    plain = message.encode()
    end = 24 + plain[4]
    packet = plain[:8] + (len(plain) - 24 + length).to_bytes(4, "big") + plain[12:24]
    packet += length.to_bytes(2, "big") + plain[26:end] + b"\x7f" * length + plain[end:]
    found = tap.tap.decode(packet)
    assert type(found) is type(message)
    for name in ("key", "value", "flags", "name"):
        assert getattr(found, name, None) == getattr(message, name, None)
    spans = list(type(found).body_spans(packet))
    assert [span.first for span in spans[1:]] == [span.last + 1 for span in spans[:-1]]
    assert spans[-1].last == len(packet) - 1


def test_an_engine_private_part_beyond_the_body_is_refused() -> None:
    packet = bytearray(tap.Mutation(key=b"k", value=b"v").encode())
    packet[25] = 8
    with pytest.raises(WireError) as caught:
        tap.tap.decode(packet)
    assert str(caught.value) == "at byte 24: expected 24 bytes of fixed fields, found 18"


def test_checkpoints_are_taken_in_the_form_of_the_3_0_servers_too() -> None:
    start = tap.NamedCheckpointStart(checkpoint=2)
    packet = start.encode()
    assert packet[4] == 16
    assert packet.endswith(b"checkpoint_start" + bytes(7) + b"\x02")
    assert tap.tap.decode(packet) == start
    assert type(tap.tap.decode(tap.NamedCheckpointEnd(checkpoint=2).encode())) is tap.NamedCheckpointEnd


def test_all_nine_controls_have_their_numbers() -> None:
    assert [int(control) for control in tap.Control] == list(range(9))
    assert tap.Control(1).label == "initial vbucket stream"


def test_flags_have_the_bits_of_the_text_and_of_real_clients() -> None:
    assert [int(flag) for flag in tap.ConnectFlag] == [1, 2, 4, 8, 0x10, 0x20, 0x40, 0x80, 0x100]
    assert {flag.name: int(flag) for flag in tap.TapFlag} == {"ACK": 1, "NO_VALUE": 2, "NETWORK_BYTE_ORDER": 4}


def test_states_are_numbered_as_in_the_memcached_commands() -> None:
    (state,) = (field for field in tap.SetVbucket.layout.fields if field.name == "state")
    assert state.code is VbucketState
    assert (VbucketState.REPLICA, VbucketState.PENDING) == (2, 3)


def test_refusals_of_a_message_are_declared() -> None:
    for message in tap.tap.messages:
        if message.declaration.opcode in range(0x41, 0x48) and not message.__name__.startswith("Named"):
            assert {Status.ETMPFAIL, Status.EINVAL} <= {status for status, _ in message.declaration.errors}, message
