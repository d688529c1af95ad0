"""The last packet handler: it decodes a memcached request and runs its command."""

import pytest

from tests.support.command_peers import ManualNode, assert_refusal, open_manual_node
from upriver.wire import AnyRequest, AnyResponse, Status
from upriver.wire.dialects.memcached import Get, Hello, Noop, Observe


@pytest.fixture
def manual() -> ManualNode:
    return open_manual_node()


def test_an_opcode_without_a_command_is_unknown(manual: ManualNode) -> None:
    (answer,) = manual.peer().send(AnyRequest(opcode=0xE0))
    assert_refusal(answer, Status.UNKNOWN_COMMAND)
    assert isinstance(answer, AnyResponse)
    assert "0xe0" in answer.text


def test_a_request_with_a_wrong_body_is_refused_and_the_connection_stays(manual: ManualNode) -> None:
    answers = manual.peer().send(AnyRequest(opcode=Get.declaration.opcode, extras=b"x", opaque=1), Noop(opaque=2))
    assert_refusal(answers[0], Status.EINVAL)
    assert [answer.opaque for answer in answers] == [1, 2]


@pytest.mark.parametrize(("kind", "bytes_max"), [(Observe, 16 * 1024), (Hello, 1024)])
def test_a_list_has_a_longest_length(manual: ManualNode, kind: type, bytes_max: int) -> None:
    opcode = kind.declaration.opcode  # type: ignore[attr-defined]
    answers = manual.peer().send(
        AnyRequest(opcode=opcode, value=bytes(bytes_max + 1), opaque=1),
        AnyRequest(opcode=opcode, value=bytes(bytes_max), opaque=2),
    )
    assert_refusal(answers[0], Status.E2BIG)
    assert [answer.opaque for answer in answers] == [1, 2]
    assert answers[1].status is not Status.E2BIG


def test_a_datatype_that_was_not_agreed_on_is_refused(manual: ManualNode) -> None:
    peer = manual.peer()
    peer.refused(Noop(datatype=1), Status.EINVAL)
