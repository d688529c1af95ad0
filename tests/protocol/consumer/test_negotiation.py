"""Which request follows which answer, and where the consumer stands then."""

import pytest

from tests.support.recording_sink import RecordingCopy
from upriver.errors import InvalidArguments, PositionError, RollbackRequired, StatusError, TemporaryFailure
from upriver.model import FailoverEntry, FailoverLog, Snapshot, StreamPosition, VbucketState
from upriver.model.position import NO_END
from upriver.protocol.consumer.negotiation import Negotiation
from upriver.wire import AnyResponse, Request, Response, dcp, memcached, upr
from upriver.wire.codes import Status


def log(*entries: tuple[int, int]) -> FailoverLog:
    return FailoverLog(tuple(FailoverEntry(*entry) for entry in entries))


def told(*entries: tuple[int, int]) -> upr.FailoverLogResponse:
    return upr.FailoverLogResponse(log=_wire(entries))


def accepted(*entries: tuple[int, int]) -> upr.StreamRequestResponse:
    return upr.StreamRequestResponse(log=_wire(entries))


def _wire(entries: tuple[tuple[int, int], ...]) -> tuple[memcached.FailoverEntry, ...]:
    return tuple(memcached.FailoverEntry(vbucket_uuid=uuid, seqno=seqno) for uuid, seqno in entries)


def refused(status: Status, opcode: int = 0x53) -> Response:
    return AnyResponse(opcode=opcode, status=status, value=b"no")


def asked(request: object) -> tuple[int, int, int]:
    """Start, uuid and the seqno of the entry that an `upr` request names."""
    assert isinstance(request, upr.StreamRequest)
    return request.start_seqno, request.vbucket_uuid, request.high_seqno


def inside(seqno: int, start: int, end: int, uuid: int = 7) -> StreamPosition:
    return StreamPosition(uuid, seqno, Snapshot(start, end))


def test_dcp_asks_with_the_bounds_of_its_snapshot() -> None:
    way = Negotiation(RecordingCopy(3, inside(5, 2, 9)), 77, flags=1, end_seqno=100)
    request = way.first()
    assert isinstance(request, dcp.StreamRequest)
    assert (request.start_seqno, request.end_seqno, request.snapshot_start, request.snapshot_end) == (5, 100, 2, 9)
    assert (request.vbucket, request.opaque, request.vbucket_uuid, int(request.flags)) == (3, 77, 7, 1)
    assert way.answered(accepted((8, 4), (7, 0))) == log((8, 4), (7, 0))


@pytest.mark.parametrize("speaks_dcp", [True, False])
def test_an_answer_to_another_question_is_refused(speaks_dcp: bool) -> None:
    copy = RecordingCopy(0, StreamPosition.at(7, 5))
    way = Negotiation(copy, 1, dialects=("dcp" if speaks_dcp else "upr",))
    way.first()
    with pytest.raises(InvalidArguments):
        way.answered(told((9, 0)) if speaks_dcp else accepted((9, 0)))
    assert copy.told == []


def test_it_rolls_back_as_told_and_asks_again() -> None:
    copy = RecordingCopy(0, inside(5, 2, 9))
    way = Negotiation(copy, 1)
    way.first()
    request = way.answered(dcp.RollbackRequired(seqno=2))
    assert isinstance(request, dcp.StreamRequest)
    assert copy.told == ["rolled back to 2"]
    assert (request.start_seqno, request.snapshot_start, request.snapshot_end) == (2, 2, 2)


def test_a_rollback_that_leads_nowhere_becomes_one_to_0() -> None:
    copy = RecordingCopy(0, StreamPosition.at(7, 5))
    way = Negotiation(copy, 1)
    way.first()
    request = way.answered(dcp.RollbackRequired(seqno=9))
    assert isinstance(request, dcp.StreamRequest)
    assert request.start_seqno == 0
    with pytest.raises(RollbackRequired):
        way.answered(dcp.RollbackRequired(seqno=0))


def test_a_producer_that_does_not_understand_48_bytes_is_asked_with_40() -> None:
    way = Negotiation(RecordingCopy(), 1)
    way.first()
    assert isinstance(way.answered(refused(Status.EINVAL)), upr.FailoverLogRequest)
    assert asked(way.answered(told((5, 0)))) == (0, 5, 0)
    assert not way.speaks_dcp
    with pytest.raises(StatusError):
        way.answered(refused(Status.EINVAL))


def test_a_consumer_of_one_dialect_does_not_try_the_other() -> None:
    way = Negotiation(RecordingCopy(), 1, dialects=("dcp",))
    way.first()
    with pytest.raises(StatusError, match="no"):
        way.answered(refused(Status.EINVAL))
    assert isinstance(Negotiation(RecordingCopy(), 1, dialects=("upr",)).first(), upr.FailoverLogRequest)


def test_every_other_refusal_is_passed_on() -> None:
    way = Negotiation(RecordingCopy(4), 1)
    way.first()
    with pytest.raises(TemporaryFailure) as caught:
        way.answered(refused(Status.ETMPFAIL))
    assert caught.value.vbucket == 4


def test_a_log_without_entries_is_none() -> None:
    way = Negotiation(RecordingCopy(), 1)
    way.first()
    with pytest.raises(PositionError):
        way.answered(accepted())


def upr_way(
    position: StreamPosition, ours: FailoverLog, *theirs: tuple[int, int]
) -> tuple[Negotiation, RecordingCopy, Request]:
    copy = RecordingCopy(0, position, ours)
    way = Negotiation(copy, 1, dialects=("upr",))
    way.first()
    request = way.answered(told(*theirs))
    assert isinstance(request, Request)
    return way, copy, request


def test_upr_goes_on_inside_a_snapshot_while_its_branch_is_the_newest() -> None:
    _, copy, request = upr_way(inside(5, 2, 99), log((7, 1)), (7, 1), (6, 0))
    assert asked(request) == (5, 7, 1)
    assert copy.told == []


def test_upr_goes_back_to_where_it_was_whole_after_a_failover() -> None:
    _, copy, request = upr_way(inside(5, 2, 99), log((7, 1)), (8, 9), (7, 1))
    assert copy.told == ["rolled back to 2"]
    assert asked(request) == (2, 7, 1)


def test_upr_stays_if_it_is_whole_after_a_failover() -> None:
    _, copy, request = upr_way(StreamPosition.at(7, 5), log((7, 1)), (8, 9), (7, 1))
    assert copy.told == []
    assert asked(request) == (5, 7, 1)


def test_upr_looks_at_the_log_once_more_when_it_is_accepted_inside_a_snapshot() -> None:
    way = Negotiation(RecordingCopy(0, inside(5, 2, 9), log((7, 0))), 1, dialects=("upr",))
    way.first()
    way.answered(told((7, 0)))
    with pytest.raises(TemporaryFailure):
        way.answered(accepted((8, 6), (7, 0)))
    whole = Negotiation(RecordingCopy(0, inside(5, 5, 5), log((7, 0))), 1, dialects=("upr",))
    whole.first()
    whole.answered(told((7, 0)))
    assert whole.answered(accepted((8, 6), (7, 0))) == log((8, 6), (7, 0))


def test_upr_gives_up_what_its_own_newer_branches_wrote() -> None:
    ours = log((9, 4), (8, 3), (7, 1))
    _, copy, request = upr_way(StreamPosition.at(9, 6), ours, (10, 20), (7, 1))
    assert copy.told == ["rolled back to 3"]
    assert asked(request) == (3, 7, 1)


def test_upr_starts_over_if_it_knows_no_entry() -> None:
    _, copy, request = upr_way(StreamPosition.at(9, 6), log((9, 4)), (2, 5), (1, 8))
    assert copy.told == ["rolled back to 0"]
    assert asked(request) == (0, 1, 8)


@pytest.mark.parametrize("status", [Status.KEY_ENOENT, Status.ERANGE])
def test_upr_takes_an_unknown_uuid_and_a_range_for_a_rollback(status: Status) -> None:
    way, copy, _ = upr_way(StreamPosition.at(7, 5), log((7, 1)), (7, 1))
    assert asked(way.answered(refused(status)))[0] == 0
    assert copy.told == ["rolled back to 0"]
    with pytest.raises(RollbackRequired):
        way.answered(refused(status))


def test_upr_without_a_log_is_refused() -> None:
    way = Negotiation(RecordingCopy(), 1, dialects=("upr",))
    way.first()
    with pytest.raises(StatusError):
        way.answered(refused(Status.KEY_ENOENT, opcode=0x54))


@pytest.mark.parametrize("dialect", ["dcp", "upr"])
@pytest.mark.parametrize(
    "answer",
    [accepted((7, 0)), dcp.RollbackRequired(seqno=4), refused(Status.ERANGE)],
    ids=lambda answer: answer.title(),
)
def test_a_copy_that_wrote_a_history_of_its_own_meanwhile_takes_no_stream(dialect: str, answer: Response) -> None:
    """Whatever is answered is about the branch that it asked from. What it wrote is left to the next request."""
    copy = RecordingCopy(0, StreamPosition.at(7, 5), log((7, 0)))
    way = Negotiation(copy, 9, end_seqno=20, dialects=(dialect,))
    if isinstance(way.first(), upr.FailoverLogRequest):
        way.answered(told((7, 0)))
    copy.position = StreamPosition.at(8, 6)
    with pytest.raises(TemporaryFailure, match="branch of its own"):
        way.answered(answer)
    assert copy.told == []


@pytest.mark.parametrize("dialect", ["dcp", "upr"])
@pytest.mark.parametrize(
    "answer",
    [accepted((7, 0)), dcp.RollbackRequired(seqno=4), told((8, 0)), refused(Status.ERANGE)],
    ids=lambda answer: answer.title(),
)
def test_a_copy_that_is_dead_meanwhile_keeps_what_it_has(dialect: str, answer: Response) -> None:
    """It may be all that is left, and the operator that made it dead relies on that."""
    copy = RecordingCopy(0, StreamPosition.at(7, 5), log((7, 0)))
    way = Negotiation(copy, 9, dialects=(dialect,))
    way.first()
    copy.state = VbucketState.DEAD
    with pytest.raises(TemporaryFailure, match="became dead"):
        way.answered(answer)
    assert copy.told == []
    assert copy.failover_log == log((7, 0))


def test_an_end_whose_state_is_gone_is_left_out_on_upr() -> None:
    copy = RecordingCopy(0, StreamPosition.at(7, 5))
    copy.replace_failover_log(log((7, 0)))
    copy.told.clear()
    way = Negotiation(copy, 1, end_seqno=9, dialects=("upr",))
    way.first()
    way.answered(told((7, 0)))
    request = way.answered(refused(Status.ERANGE))
    assert isinstance(request, upr.StreamRequest)
    assert (request.start_seqno, request.end_seqno) == (5, NO_END)
    assert copy.told == []
    # Refused again, it was not the end: the place itself is unknown there.
    assert asked(way.answered(refused(Status.ERANGE)))[0] == 0
