"""Refusals tell the request they belong to, and always say something."""

from upriver.errors import Busy, StatusError, WireError
from upriver.node.session.refusals import header_refusal, malformed, refusal
from upriver.wire import Status
from upriver.wire.dialects.memcached import Get, Set


def test_no_refusal_is_without_a_text() -> None:
    for status in Status:
        answer = refusal(Get(key=b"k", opaque=4), StatusError.of(status))
        assert (answer.status, answer.opaque, answer.opcode, answer.cas) == (status, 4, 0, 0)
        assert answer.value


def test_the_reason_is_the_text() -> None:
    assert refusal(Get(key=b"k"), Busy("try again")).value == b"try again"


def test_a_header_is_enough() -> None:
    data = b"before" + Set(key=b"k", value=b"v", opaque=7).encode()
    answer = header_refusal(data[: 6 + 24], 6, Status.E2BIG, "too large")
    assert (answer.opcode, answer.opaque, answer.status, answer.value) == (0x01, 7, Status.E2BIG, b"too large")
    answer = malformed(data[6:], WireError(24, "extras", "nothing"))
    assert (answer.status, answer.value) == (Status.EINVAL, b"at byte 24: expected extras, found nothing")
