"""Dialects: no two messages under one number, and the right class for every packet."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.message_strategies import messages
from upriver.errors import WireError
from upriver.model import Event
from upriver.wire import DIALECTS, AnyRequest, AnyResponse, Dialect, Message, Request, Response, dcp, memcached, upr
from upriver.wire.codes import Status
from upriver.wire.fields import U8, U16, U32, Key
from upriver.wire.framing import DRAFT, MEMCACHED
from upriver.wire.message import DraftMessage


@pytest.fixture
def dialect() -> Dialect:
    made = Dialect("example", framing=MEMCACHED, document="the tests")

    @made.request(0x01)
    class Taken(Request):
        """Has opcode 1 and 4 bytes of extras."""

        number: U32

    @made.response(0x01)
    class Answer(Response):
        """Answers it."""

        number: U32

    return made


def test_there_are_six_dialects_and_the_commands() -> None:
    assert list(DIALECTS) == ["memcached", "tap", "upr_draft1", "upr_draft2", "upr_draft3", "upr", "dcp"]
    assert all(dialect.name == name and dialect.document for name, dialect in DIALECTS.items())


def test_an_opcode_with_the_same_extras_is_refused(dialect: Dialect) -> None:
    with pytest.raises(TypeError, match="Other: opcode 0x01 with 4 bytes of extras is already declared by Taken"):

        @dialect.request(0x01)
        class Other(Request):
            first: U16
            second: U16


def test_an_opcode_with_other_extras_is_another_request(dialect: Dialect) -> None:
    @dialect.request(0x01)
    class Other(Request):
        """The same opcode, told apart by its extras."""

        number: U16

    assert type(dialect.decode(Other(number=1).encode())) is Other
    assert dialect.decode(Other(number=1).encode()) == Other(number=1)


def test_a_number_that_may_stand_in_the_value_claims_an_opcode_without_extras_too(dialect: Dialect) -> None:
    @dialect.request(0x02, either=True)
    class Either(Request):
        number: U32

    with pytest.raises(TypeError, match="opcode 0x02 with 0 bytes of extras is already declared by Either"):

        @dialect.request(0x02)
        class Empty(Request):
            pass


def test_an_answer_with_the_same_status_is_refused(dialect: Dialect) -> None:
    with pytest.raises(TypeError, match="Other: opcode 0x01 with status success is already declared by Answer"):

        @dialect.response(0x01, status=(Status.ROLLBACK, Status.SUCCESS))
        class Other(Response):
            number: U8


def test_a_draft_message_with_the_same_type_is_refused() -> None:
    draft = Dialect("draft", framing=DRAFT, document="the tests")

    @draft.message(4, 1)
    class First(DraftMessage):
        number: U8

    with pytest.raises(TypeError, match="Second: opcode 4 with type 1 is already declared by First"):

        @draft.message(4, 1)
        class Second(DraftMessage):
            number: U8


def test_a_fixed_part_that_does_not_add_up_is_refused(dialect: Dialect) -> None:
    with pytest.raises(TypeError, match="a fixed part of 8 bytes is declared, its fields take 4"):

        @dialect.request(0x03, extras=(8,))
        class Wrong(Request):
            number: U32


def test_undeclared_extras_of_a_declared_opcode_are_refused(dialect: Dialect) -> None:
    packet = AnyRequest(opcode=0x01, extras=b"123").encode()
    with pytest.raises(WireError) as caught:
        dialect.decode(packet)
    assert str(caught.value) == "at byte 4: expected 4 bytes of extras in taken, found 3"


def test_an_answer_without_a_class_is_kept_whole(dialect: Dialect) -> None:
    refusal = AnyResponse(opcode=0x01, status=Status(0x77), value=b"no")
    assert dialect.decode(refusal.encode()) == refusal


def test_a_dialect_finds_what_it_does_not_declare_in_the_one_that_it_extends(dialect: Dialect) -> None:
    extended = Dialect("extended", framing=MEMCACHED, document="the tests", extends=dialect)

    @extended.request(0x01)
    class Longer(Request):
        number: U32
        name: Key

    shorter = dialect.messages[0]
    assert extended.class_of(Longer(number=1, name=b"n").encode()) is Longer
    assert dialect.class_of(Longer(number=1, name=b"n").encode()) is shorter
    assert extended.class_of(AnyResponse(opcode=0x01, extras=bytes(4)).encode()) is dialect.messages[1]
    assert list(extended.all_messages()) == [Longer, *dialect.messages]


INHERITED = [
    pytest.param(dialect, cls, id=f"{dialect.name}.{cls.__name__}")
    for dialect in DIALECTS.values()
    for cls in dialect.all_messages()
    if cls.declaration.dialect != dialect.name
    and not any(
        own.declaration.opcode == cls.declaration.opcode and own.declaration.type_code == cls.declaration.type_code
        for own in dialect.messages
    )
    and cls.declaration.dialect != "memcached"
]


@pytest.mark.parametrize(("dialect", "cls"), INHERITED)
@settings(max_examples=5)
@given(st.data())
def test_inherited_messages_decode_alike(dialect: Dialect, cls: type[Message], data: st.DataObject) -> None:
    message = data.draw(messages(cls))
    assert dialect.decode(message.encode()) == message


@pytest.mark.parametrize("name", ["tap", "upr_draft3", "upr", "dcp"])
def test_every_dialect_with_the_long_header_knows_the_commands(name: str) -> None:
    for message in (memcached.Get(key=b"k"), memcached.SaslAuth(mechanism=b"PLAIN"), memcached.SetResponse()):
        assert DIALECTS[name].decode(message.encode()) == message


def test_a_type_that_a_draft_does_not_know_is_refused() -> None:
    packet = bytes.fromhex("04000000 00000001 00000001 09")
    with pytest.raises(WireError) as caught:
        DIALECTS["upr_draft2"].decode(packet)
    assert str(caught.value) == "at byte 12: expected type 1 or 2 or 3 or 4 or 5 or 6, found 9"


def test_a_draft_body_without_a_type_is_refused() -> None:
    packet = bytes.fromhex("04000000 00000001 00000000")
    with pytest.raises(WireError) as caught:
        DIALECTS["upr_draft2"].decode(packet)
    assert str(caught.value) == "at byte 8: expected a body that begins with a type, found an empty body"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("tap", {0x41: Event.MUTATION, 0x42: Event.DELETION}),
        ("upr", {0x57: Event.MUTATION, 0x58: Event.DELETION, 0x59: Event.EXPIRATION}),
        ("dcp", {0x57: Event.MUTATION, 0x58: Event.DELETION, 0x59: Event.EXPIRATION}),
        ("upr_draft3", {0x56: Event.MUTATION, 0x57: Event.DELETION, 0x58: Event.EXPIRATION}),
    ],
)
def test_changes_are_the_messages_that_change_a_key(name: str, changes: dict[int, Event]) -> None:
    found = {cls.declaration.opcode: cls.declaration.change for cls in DIALECTS[name].change_messages()}
    assert found == changes


def test_own_changes_come_after_inherited_ones() -> None:
    mutations = [cls for cls in DIALECTS["dcp"].change_messages() if cls.declaration.opcode == 0x57]
    assert mutations == [upr.Mutation, dcp.Mutation]


def test_requests_have_titles() -> None:
    assert DIALECTS["dcp"].request_title(0x56) == "snapshot marker"
    assert DIALECTS["upr_draft3"].request_title(0x56) == "mutation"
    assert DIALECTS["dcp"].request_title(0xEE) is None


def test_the_answers_to_an_opcode_are_the_dialects_own_first() -> None:
    assert set(DIALECTS["dcp"].responses_to(0x53)) == {dcp.RollbackRequired, upr.StreamRequestResponse}
    assert set(DIALECTS["upr"].responses_to(0x53)) == {upr.RollbackRequired, upr.StreamRequestResponse}
