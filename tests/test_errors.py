"""The exception tree: structured attributes, whole sentences, one class per status."""

import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver import errors
from upriver.errors import (
    CannotListen,
    CorruptData,
    DataInUse,
    ForeignData,
    KeyNotFound,
    NewerFormat,
    NotMyVbucket,
    OutOfOrder,
    PositionError,
    RollbackRequired,
    StatusError,
    StorageError,
    UpriverError,
    WireError,
)

STATUSES = {
    0x01: "KeyNotFound",
    0x02: "KeyExists",
    0x03: "TooBig",
    0x04: "InvalidArguments",
    0x05: "NotStored",
    0x06: "NotANumber",
    0x07: "NotMyVbucket",
    0x08: "NoBucket",
    0x09: "Locked",
    0x0E: "NotLocked",
    0x20: "AuthenticationFailed",
    0x22: "OutOfRange",
    0x23: "RollbackRequired",
    0x24: "AccessDenied",
    0x81: "UnknownCommand",
    0x82: "OutOfMemory",
    0x83: "NotSupported",
    0x84: "InternalError",
    0x85: "Busy",
    0x86: "TemporaryFailure",
    0xA3: "DurabilityAmbiguous",
}


def exceptions() -> list[type[UpriverError]]:
    found = [value for value in vars(errors).values() if isinstance(value, type)]
    return [value for value in found if issubclass(value, UpriverError)]


def test_everything_has_one_root() -> None:
    for cls in (DataInUse, ForeignData, NewerFormat, CorruptData):
        assert issubclass(cls, StorageError)
    assert issubclass(PositionError, ValueError)


def test_an_address_that_cannot_be_had() -> None:
    assert str(CannotListen("::1", 5, "taken")) == "cannot listen on [::1]:5: taken"
    assert (
        str(pickle.loads(pickle.dumps(CannotListen("127.0.0.1", 5, "taken")))) == "cannot listen on 127.0.0.1:5: taken"
    )


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    assert errors.__doc__ is not None
    tree = errors.__doc__.split("\n\n")[2]
    drawn = set(re.findall(r"\b[A-Z][a-z]+[A-Za-z]*\b", tree)) - {"one"}
    assert drawn == {cls.__name__ for cls in exceptions()}
    numbers = {int(number, 16): name for name, number in re.findall(r"(\w+) (0x[0-9a-f]{2})", tree)}
    assert numbers == STATUSES


def test_a_wire_error_says_where_what_should_stand_there_and_what_does() -> None:
    error = WireError(8, "a body of at most 100 bytes", "a length of 101")
    assert (error.offset, error.expected, error.found) == (8, "a body of at most 100 bytes", "a length of 101")
    assert str(error) == "at byte 8: expected a body of at most 100 bytes, found a length of 101"


@given(st.integers(0, 2**40), st.integers(-(2**20), 2**40))
def test_a_shifted_wire_error_differs_in_its_offset_alone(offset: int, by: int) -> None:
    error = WireError(offset, "this", "that").shifted(by)
    assert (error.offset, error.expected, error.found) == (offset + by, "this", "that")


def test_a_change_out_of_order_says_which() -> None:
    error = OutOfOrder(5, 17, "it comes after 20")
    assert (error.vbucket, error.seqno, error.why) == (5, 17, "it comes after 20")
    assert str(error) == "vbucket 5: change 17 refused: it comes after 20"


def test_a_storage_error_says_which_path() -> None:
    error = DataInUse("/data", "process 12 holds it")
    assert (error.path, error.why, str(error)) == ("/data", "process 12 holds it", "/data: process 12 holds it")


@pytest.mark.parametrize("status", STATUSES)
def test_every_status_has_its_class(status: int) -> None:
    error = StatusError.of(status, "why", vbucket=3)
    assert type(error).__name__ == STATUSES[status]
    assert (error.status, error.detail, error.vbucket) == (status, "why", 3)
    assert error.text
    assert str(error) == f"vbucket 3: why (status 0x{status:02x})"


def test_a_status_error_without_a_detail_says_what_its_class_says() -> None:
    assert str(KeyNotFound()) == "Not found (status 0x01)"
    assert str(NotMyVbucket(vbucket=0)) == "vbucket 0: Not my vbucket (status 0x07)"


@given(st.integers(0, 0xFFFF).filter(lambda status: status not in STATUSES))
def test_a_status_without_a_class_keeps_its_number(status: int) -> None:
    error = StatusError.of(status)
    assert type(error) is StatusError
    assert error.status == status
    assert str(error) == f"Refused (status 0x{status:02x})"


def test_one_status_has_one_class() -> None:
    with pytest.raises(AssertionError, match="status 0x01 belongs to KeyNotFound already"):

        class Another(StatusError, status=0x01, text="Not found"):
            pass

    assert type(StatusError.of(0x01)) is KeyNotFound


def test_a_rollback_says_where_to() -> None:
    assert RollbackRequired(seqno=17).seqno == 17
    unknown = StatusError.of(0x23)
    assert isinstance(unknown, RollbackRequired)
    assert unknown.seqno == 0


@pytest.mark.parametrize(
    "error",
    [
        WireError(8, "this", "that"),
        OutOfOrder(5, 17, "late"),
        CorruptData("/data", "bad sum"),
        KeyNotFound("no such key", vbucket=3),
        RollbackRequired(vbucket=3, seqno=17),
        StatusError.of(0x99, "odd", vbucket=1),
        PositionError("wrong"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_exceptions_survive_the_way_to_another_process(error: UpriverError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert vars(again) == vars(error)
    assert str(again) == str(error)
