"""Codes keep every number, named or not, and cost no memory for those that are not."""

import copy
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.errors import StatusError
from upriver.wire import dcp, memcached, tap, upr
from upriver.wire.codes import FlagSet, OpenEnum, Sender, Status, meaning_of

ENUMS: list[type[OpenEnum]] = [
    Status,
    dcp.EndReason,
    memcached.Feature,
    memcached.KeyState,
    memcached.VbucketState,
    tap.Control,
    upr.EndReason,
    upr.VbucketState,
]
FLAGS: list[type[FlagSet]] = [
    dcp.MarkerFlag,
    dcp.OpenFlag,
    dcp.StreamFlag,
    memcached.MetaOption,
    memcached.ObserveFormat,
    tap.ConnectFlag,
    tap.TapFlag,
    upr.AddStreamFlag,
    upr.OpenFlag,
    upr.StreamFlag,
]


@pytest.mark.parametrize("kind", ENUMS)
@given(st.integers(0, 2**32 - 1))
def test_any_number_is_kept(kind: type[OpenEnum], number: int) -> None:
    code = kind(number)
    assert isinstance(code, kind)
    assert code == number
    assert int(code) == number
    assert hash(code) == hash(number)
    assert code.known == (number in [int(member) for member in kind])


@given(st.integers(0x100, 0xFFFF))
def test_an_unknown_number_is_named_for_itself(number: int) -> None:
    assert Status(number).name == f"unknown(0x{number:02x})"
    assert Status(number).label == f"unknown(0x{number:02x})"


def test_a_known_number_is_the_member_and_reads_as_words() -> None:
    assert Status(0x07) is Status.NOT_MY_VBUCKET
    assert Status.NOT_MY_VBUCKET.label == "not my vbucket"


@pytest.mark.parametrize("wrong", [-1, "1", 1.5, None])
def test_what_is_no_number_is_no_code(wrong: Any) -> None:
    with pytest.raises(ValueError, match="is not a valid Status"):
        Status(wrong)


@pytest.mark.parametrize("kind", ENUMS)
def test_an_enumeration_does_not_grow(kind: type[OpenEnum]) -> None:
    members, remembered = list(kind), len(kind._value2member_map_)
    for number in range(0x1000, 0x1400):
        kind(number)
    assert list(kind) == members
    assert len(kind._value2member_map_) == remembered


@pytest.mark.parametrize("kind", FLAGS)
@given(st.integers(0, 2**32 - 1))
def test_any_bits_are_kept(kind: type[FlagSet], bits: int) -> None:
    flags = kind(bits)
    assert isinstance(flags, kind)
    assert flags == bits


@pytest.mark.parametrize("kind", FLAGS)
def test_a_set_of_flags_remembers_no_unknown_bits(kind: type[FlagSet]) -> None:
    known = sum(int(flag) for flag in kind)
    unknown = 1 << known.bit_length()
    for number in range(1000):
        assert ~kind(number * unknown + (number & known)) != 0
    remembered: list[Any] = list(kind._value2member_map_.values())
    assert not [flags for flags in remembered if int(flags) & ~known]


def test_flags_combine_and_invert() -> None:
    flags = dcp.MarkerFlag.MEMORY | dcp.MarkerFlag.ACK
    assert flags == 9
    assert dcp.MarkerFlag.ACK in flags
    assert flags & ~dcp.MarkerFlag.ACK == dcp.MarkerFlag.MEMORY
    assert dcp.MarkerFlag(0x149) & dcp.MarkerFlag.ACK
    assert list(dcp.MarkerFlag) == [1, 2, 4, 8, 0x10, 0x20]


@pytest.mark.parametrize("code", [Status.ROLLBACK, Status(0x99), dcp.MarkerFlag(0x149), dcp.MarkerFlag(0)])
def test_codes_can_be_copied_and_sent_to_another_process(code: object) -> None:
    for again in (copy.copy(code), copy.deepcopy(code), pickle.loads(pickle.dumps(code))):
        assert again == code
        assert type(again) is type(code)


@pytest.mark.parametrize(
    ("value", "meaning"),
    [
        (upr.VbucketState.DEAD, "dead"),
        (upr.VbucketState(9), "unknown(0x09)"),
        (dcp.MarkerFlag(0), ""),
        (dcp.MarkerFlag.DISK | dcp.MarkerFlag.MAY_DUPLICATE_KEYS, "disk, may duplicate keys"),
        (dcp.MarkerFlag(0x42), "disk, unknown(0x40)"),
        (dcp.MarkerFlag(0x40), "unknown(0x40)"),
        (5, ""),
        (b"key", ""),
    ],
)
def test_a_meaning_is_what_a_reader_would_say(value: object, meaning: str) -> None:
    assert meaning_of(value) == meaning


def test_every_status_that_refuses_has_an_exception_of_its_own() -> None:
    no_refusals = {Status.SUCCESS, Status.AUTH_CONTINUE}
    plain = {status for status in Status if type(StatusError.of(status)) is StatusError}
    assert plain == no_refusals


def test_a_sender_reads_as_words() -> None:
    assert Sender.EITHER.value == "either side"
