"""The streams of one connection: settings, questions, answers, acknowledgements, silence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.consumer_messages import QUIET, messages, status_of
from tests.support.packet_feeder import PacketFeeder
from tests.support.recording_sink import RecordingCopy, RecordingSink
from upriver.errors import (
    InvalidArguments,
    KeyExists,
    KeyNotFound,
    NotMyVbucket,
    StatusError,
    TemporaryFailure,
    TooBig,
    WireError,
)
from upriver.model import VbucketState
from upriver.model.position import SEQNO_MAX
from upriver.protocol.consumer.consumer import ConsumerConnection, ConsumerOptions
from upriver.protocol.consumer.consumer_stream import ConsumerStream
from upriver.wire import AnyResponse, Message, Request, dcp, memcached, upr
from upriver.wire.codes import Status

LOG = (memcached.FailoverEntry(vbucket_uuid=7, seqno=0),)


class ConsumerUnderTest:
    """A consumer with a recording sink of two vbuckets; the test plays its producer."""

    def __init__(self, options: ConsumerOptions = QUIET) -> None:
        self.copies = RecordingCopy(0), RecordingCopy(1)
        self.sink = RecordingSink(*self.copies)
        self.ended: list[ConsumerStream] = []
        self.outputs = 0
        self.consumer = ConsumerConnection(self.sink, 0.0, options, on_output=self._note, on_end=self.ended.append)
        self.answers: list[tuple[int, StatusError | None]] = []

    def _note(self) -> None:
        self.outputs += 1

    def sent(self) -> list[Message]:
        return list(messages(self.consumer.data_to_send()))

    def add(self, vbucket: int = 0, flags: int = 1) -> ConsumerStream:
        """Ask for a stream, by default a takeover."""
        return self.consumer.add_stream(
            vbucket, lambda stream, error: self.answers.append((stream.vbucket, error)), flags=flags
        )

    def open(self, vbucket: int = 0, flags: int = 1) -> ConsumerStream:
        stream = self.add(vbucket, flags)
        self.sent()
        self.tell(upr.StreamRequestResponse(log=LOG, opaque=stream.opaque))
        return stream

    def tell(self, message: Message, now: float = 0.0) -> list[Message]:
        assert self.consumer.receive(message, now)
        return self.sent()


def of(stream: ConsumerStream, message: Request) -> Request:
    message.vbucket, message.opaque = stream.vbucket, stream.opaque
    return message


def marker(stream: ConsumerStream, end: int = 9, flags: int = 1) -> Request:
    return of(stream, dcp.SnapshotMarker(start_seqno=0, end_seqno=end, flags=dcp.MarkerFlag(flags)))


def mutation(stream: ConsumerStream, seqno: int) -> Request:
    return of(stream, dcp.Mutation(by_seqno=seqno, key=b"k%d" % seqno))


def test_settings_go_before_the_first_request_and_only_once() -> None:
    tested = ConsumerUnderTest(ConsumerOptions(noop_interval_s=20, controls={"keys_only": "true"}))
    tested.add(0)
    *controls, request = tested.sent()
    assert [(control.key, control.value) for control in controls if isinstance(control, dcp.Control)] == [
        (b"connection_buffer_size", b"10485760"),
        (b"enable_noop", b"true"),
        (b"set_noop_interval", b"20"),
        (b"enable_expiry_opcode", b"true"),
        (b"keys_only", b"true"),
    ]
    assert isinstance(request, dcp.StreamRequest)
    tested.add(1)
    (request,) = tested.sent()
    assert isinstance(request, dcp.StreamRequest)
    assert len({message.opaque for message in (*controls, request)}) == 6  # type: ignore[attr-defined]


def test_a_stream_is_there_when_the_producer_says_so() -> None:
    tested = ConsumerUnderTest()
    stream = tested.open()
    assert tested.answers == [(0, None)]
    assert tested.consumer.dialect == "dcp"
    assert tested.copies[0].failover_log.newest.vbucket_uuid == 7
    with pytest.raises(KeyExists):
        tested.add()
    with pytest.raises(NotMyVbucket):
        tested.add(5)
    assert tested.consumer.streams == {0: stream}


def test_a_refused_stream_leaves_nothing_behind() -> None:
    tested = ConsumerUnderTest()
    stream = tested.add()
    tested.tell(AnyResponse(opcode=0x53, status=Status.ETMPFAIL, opaque=stream.opaque))
    ((_, error),) = tested.answers
    assert isinstance(error, TemporaryFailure)
    assert not tested.consumer.streams
    assert tested.copies[0].closed
    assert tested.ended == []  # it never was
    tested.open()


def test_an_empty_log_is_refused() -> None:
    tested = ConsumerUnderTest()
    stream = tested.add()
    tested.tell(upr.StreamRequestResponse(opaque=stream.opaque))
    ((_, error),) = tested.answers
    assert error is not None
    assert error.status == Status.EINVAL


@pytest.mark.parametrize("early", ["marker", "mutation", "end", "flush"])
def test_what_comes_before_the_answer_ends_its_stream_and_waiters_are_told(early: str) -> None:
    tested = ConsumerUnderTest()
    stream = tested.add()
    tested.sent()
    tested.tell(
        {
            "marker": marker(stream),
            "mutation": mutation(stream, 1),
            "end": of(stream, dcp.StreamEnd(reason=dcp.EndReason.OK)),
            "flush": of(stream, upr.Flush()),
        }[early]
    )
    ((_, error),) = tested.answers
    assert isinstance(error, InvalidArguments)
    assert tested.ended == []  # it never was
    log = tested.copies[0].failover_log
    tested.tell(upr.StreamRequestResponse(opaque=stream.opaque, log=LOG))
    assert tested.copies[0].failover_log == log, "the answer belongs to no stream any more"
    assert not tested.consumer.closing
    tested.sent()
    tested.add()
    assert [type(message) for message in tested.sent()] == [upr.CloseStream, dcp.StreamRequest]


def test_runs_of_several_streams_go_to_their_copies() -> None:
    tested = ConsumerUnderTest()
    one, two = tested.open(0), tested.open(1)
    tested.tell(marker(one))
    tested.tell(marker(two))
    data = b"".join(mutation(stream, seqno).encode() for stream, seqno in ((one, 1), (one, 2), (two, 1), (one, 3)))
    tail = of(one, dcp.StreamEnd()).encode()
    end, runs = tested.consumer.receive_runs(data + tail, 0, 0.0)
    assert end == len(data)
    assert [(run.vbucket, run.rows, run.position.seqno) for run in runs] == [(0, 2, 2), (1, 1, 1), (0, 1, 3)]
    assert tested.copies[0].told[1:] == ["k1 k2", "k3"]
    assert tested.copies[1].told[1:] == ["k1"]
    assert tested.consumer.changes_received == 4


@pytest.mark.parametrize("wrong", ["vbucket", "opaque"])
def test_what_was_not_asked_for_is_answered_and_not_taken(wrong: str) -> None:
    tested = ConsumerUnderTest()
    stream = tested.open()
    tested.tell(marker(stream))
    stray = mutation(stream, 1)
    setattr(stray, wrong, 1000)
    assert tested.consumer.receive_runs(stray.encode(), 0, 0.0)[0] == 0
    (answer,) = tested.tell(stray)
    assert isinstance(answer, AnyResponse)
    assert (answer.status, answer.opcode, answer.opaque) == (Status.KEY_ENOENT, 0x57, stray.opaque)
    assert len(tested.copies[0].told) == 1
    assert not stream.life.ended


def test_what_comes_after_a_close_is_answered_so_that_the_producer_knows() -> None:
    tested = ConsumerUnderTest()
    stream = tested.open()
    tested.consumer.close_stream(0)
    assert tested.ended == [stream]
    for message in (marker(stream), mutation(stream, 1), of(stream, upr.Flush()), of(stream, dcp.StreamEnd())):
        assert status_of(tested.tell(message)) is Status.KEY_ENOENT
    with pytest.raises(KeyNotFound):
        tested.consumer.close_stream(0)


def test_a_stream_that_is_closed_before_it_is_answered() -> None:
    tested = ConsumerUnderTest()
    stream = tested.add()
    tested.sent()
    tested.consumer.close_stream(0)
    ((_, error),) = tested.answers
    assert isinstance(error, KeyNotFound)
    tested.tell(upr.StreamRequestResponse(log=LOG, opaque=stream.opaque))  # too late
    assert tested.copies[0].failover_log.newest.vbucket_uuid == 1


def test_an_old_change_is_answered_and_the_stream_goes_on() -> None:
    tested = ConsumerUnderTest()
    stream = tested.open()
    tested.tell(marker(stream))
    assert tested.tell(mutation(stream, 3)) == []
    assert status_of(tested.tell(mutation(stream, 3))) is Status.ERANGE
    assert tested.tell(mutation(stream, 4)) == []


def test_a_change_too_far_ends_its_stream() -> None:
    tested = ConsumerUnderTest()
    stream = tested.open()
    tested.tell(marker(stream, end=3))
    assert status_of(tested.tell(mutation(stream, 4))) is Status.ERANGE
    assert tested.ended == [stream]
    assert status_of(tested.tell(marker(stream))) is Status.KEY_ENOENT


def test_a_marker_in_the_wrong_place_or_dialect_ends_its_stream() -> None:
    tested = ConsumerUnderTest()
    stream = tested.open()
    assert status_of(tested.tell(of(stream, upr.SnapshotMarker()))) is Status.EINVAL
    assert stream.life.ended
    stream = tested.open()
    tested.tell(of(stream, upr.SetVbucketState(state=upr.VbucketState.PENDING)))
    assert status_of(tested.tell(marker(stream))) is Status.EINVAL
    assert tested.ended[-1] is stream


@pytest.mark.parametrize("end", [SEQNO_MAX + 1, 2**64 - 2, 2**64 - 1])
@pytest.mark.parametrize("start", [0, SEQNO_MAX, 2**64 - 1])
def test_a_snapshot_that_no_history_reaches_is_refused_and_costs_its_stream(start: int, end: int) -> None:
    tested = ConsumerUnderTest()
    stream, other = tested.open(0), tested.open(1)
    tested.tell(marker(stream, end=1))
    tested.tell(mutation(stream, 1))
    wrong = of(stream, dcp.SnapshotMarker(start_seqno=start, end_seqno=end, flags=dcp.MarkerFlag.MEMORY))
    assert status_of(tested.tell(wrong)) is Status.ERANGE
    assert tested.ended == [stream]
    assert (tested.copies[0].position.seqno, tested.copies[0].position.consistent_seqno) == (1, 1)
    assert status_of(tested.tell(mutation(stream, 2))) is Status.KEY_ENOENT
    assert not tested.consumer.closing
    assert tested.tell(marker(other)) == [], "the others go on"
    tested.open(0)


@pytest.mark.parametrize("seqno", [SEQNO_MAX + 1, 2**64 - 1])
def test_nothing_lies_beyond_the_last_seqno(seqno: int) -> None:
    """Neither a change nor what did not pass a filter, though the snapshot has room up to the very last."""
    for message in (dcp.Mutation(by_seqno=seqno, key=b"k"), dcp.SeqnoAdvanced(by_seqno=seqno)):
        tested = ConsumerUnderTest()
        stream = tested.open()
        tested.tell(marker(stream, end=SEQNO_MAX))
        assert status_of(tested.tell(of(stream, message))) is Status.ERANGE
        assert tested.ended == [stream]
        assert tested.copies[0].position.seqno == 0


def test_a_sink_without_room_gets_the_rest_again() -> None:
    tested = ConsumerUnderTest()
    stream = tested.open()
    tested.tell(marker(stream))
    data = b"".join(mutation(stream, seqno).encode() for seqno in (1, 2, 3))
    size = len(data) // 3
    tested.copies[0].room = 2
    assert tested.consumer.receive_runs(data, 0, 0.0)[0] == 2 * size
    assert tested.consumer.full
    assert not stream.life.ended
    assert tested.consumer.receive_runs(data, 2 * size, 0.0)[0] == 2 * size  # still
    tested.copies[0].room = None
    tested.consumer.go_on()
    assert tested.consumer.receive_runs(data, 2 * size, 0.0)[0] == 3 * size
    assert not tested.consumer.full
    assert tested.copies[0].told[1:] == ["k1 k2", "k3"]
    assert stream.changes_received == 3


def test_a_single_change_without_room_ends_its_stream() -> None:
    tested = ConsumerUnderTest()
    stream = tested.open()
    tested.tell(marker(stream))
    tested.copies[0].room = 0
    assert status_of(tested.tell(mutation(stream, 1))) is Status.ETMPFAIL
    assert stream.life.ended


def test_a_sink_that_refuses_a_change_ends_the_stream() -> None:
    tested = ConsumerUnderTest()
    stream = tested.open()
    tested.tell(marker(stream))
    tested.copies[0].failure = TooBig("much too big")
    change = mutation(stream, 1)
    assert tested.consumer.receive_runs(change.encode(), 0, 0.0)[0] == 0
    assert stream.life.ended
    assert status_of(tested.tell(change)) is Status.KEY_ENOENT
    assert "much too big" in stream.end_reason


def test_a_consumer_that_left_a_stream_closes_it_before_asking_again() -> None:
    tested = ConsumerUnderTest()
    stream = tested.open()
    tested.tell(mutation(stream, 4))  # without a marker: the stream is over, and its producer does not know
    assert stream.life.ended
    tested.add()
    close, request = tested.sent()
    assert isinstance(close, upr.CloseStream)
    assert isinstance(request, dcp.StreamRequest)
    tested.tell(upr.StreamRequestResponse(log=LOG, opaque=request.opaque))
    tested.tell(of(tested.consumer.streams[0], dcp.StreamEnd(reason=dcp.EndReason.STATE_CHANGED)))
    tested.add()
    (request,) = tested.sent()
    assert isinstance(request, dcp.StreamRequest)


def test_states_are_answered_when_they_are_on_disk() -> None:
    tested = ConsumerUnderTest()
    stream = tested.open()
    for state in (VbucketState.PENDING, VbucketState.ACTIVE):
        message = of(stream, upr.SetVbucketState(state=upr.VbucketState[state.name]))
        assert tested.tell(message) == []
        assert tested.copies[0].state is state
        outputs = tested.outputs
        tested.sink.reach_disk()
        assert tested.outputs == outputs + 1
        assert status_of(tested.sent()) is Status.SUCCESS
    assert tested.tell(of(stream, dcp.StreamEnd())) == []
    assert tested.ended == [stream]


@pytest.mark.parametrize("asked", [VbucketState.PENDING, VbucketState.ACTIVE])
@pytest.mark.parametrize("now", [VbucketState.REPLICA, VbucketState.DEAD])
def test_a_state_that_is_another_before_the_disk_knows_it_is_refused(asked: VbucketState, now: VbucketState) -> None:
    """Otherwise the source would become dead for a copy that is not pending, or a mover announce a wrong owner."""
    tested = ConsumerUnderTest()
    stream = tested.open()
    tested.tell(of(stream, upr.SetVbucketState(state=upr.VbucketState.PENDING)))
    if asked is VbucketState.ACTIVE:
        tested.sink.reach_disk()
        tested.sent()
        tested.tell(of(stream, upr.SetVbucketState(state=upr.VbucketState.ACTIVE)))
    tested.copies[0].state = now
    outputs = tested.outputs
    tested.sink.reach_disk()
    assert tested.outputs == outputs + 1
    assert status_of(tested.sent()) is Status.EINVAL
    assert tested.ended == [stream]
    assert tested.copies[0].closed


def test_a_lost_connection_gets_no_late_answers() -> None:
    tested = ConsumerUnderTest()
    stream, asking = tested.open(0), tested.add(1)
    tested.tell(of(stream, upr.SetVbucketState(state=upr.VbucketState.PENDING)))
    tested.consumer.lose()
    tested.sink.reach_disk()
    assert tested.sent() == []
    assert set(tested.ended) == {stream, asking}
    assert isinstance(tested.answers[-1][1], KeyNotFound)
    assert all(copy.closed for copy in tested.copies)


def test_an_unknown_state_is_refused() -> None:
    tested = ConsumerUnderTest()
    stream = tested.open()
    assert status_of(tested.tell(of(stream, upr.SetVbucketState(state=upr.VbucketState(99))))) is Status.EINVAL
    assert tested.copies[0].state is VbucketState.REPLICA


@pytest.mark.parametrize("state", list(upr.VbucketState))
def test_a_stream_that_is_no_takeover_changes_no_role(state: upr.VbucketState) -> None:
    tested = ConsumerUnderTest()
    stream = tested.open(flags=0)
    assert status_of(tested.tell(of(stream, upr.SetVbucketState(state=state)))) is Status.EINVAL
    assert tested.copies[0].state is VbucketState.REPLICA
    assert not stream.life.ended


def test_noops_are_answered_with_their_opaque() -> None:
    (answer,) = ConsumerUnderTest().tell(dcp.Noop(opaque=0x99))
    assert isinstance(answer, AnyResponse)
    assert (answer.opcode, answer.opaque, answer.status) == (0x5C, 0x99, Status.SUCCESS)


def test_bytes_are_acknowledged_when_a_part_of_the_window_is_used_or_after_some_seconds() -> None:
    tested = ConsumerUnderTest(ConsumerOptions(window_bytes=1000, noop_interval_s=0, expirations=False))
    stream = tested.open()
    assert tested.consumer.deadline is None
    size = len(marker(stream).encode())
    assert tested.tell(marker(stream), now=1.0) == []
    assert tested.consumer.deadline == 5.0
    tested.consumer.tick(4.9)
    assert tested.sent() == []
    tested.consumer.tick(5.0)
    (ack,) = tested.sent()
    assert isinstance(ack, dcp.BufferAck)
    assert ack.bytes_processed == size
    change = of(stream, dcp.Mutation(by_seqno=1, key=b"k1", value=b"v" * 300)).encode()
    tested.consumer.receive_runs(change, 0, 6.0)
    (ack,) = tested.sent()
    assert isinstance(ack, dcp.BufferAck)
    assert ack.bytes_processed == len(change)
    assert tested.consumer.window.acked_bytes_total == tested.consumer.bytes_received_total == size + len(change)


def test_a_producer_that_knows_no_window_gets_no_acknowledgements() -> None:
    tested = ConsumerUnderTest(ConsumerOptions(window_bytes=10, noop_interval_s=0, expirations=False))
    tested.add()
    control, request = tested.sent()
    assert isinstance(control, dcp.Control)
    tested.tell(AnyResponse(opcode=control.code, opaque=control.opaque, status=Status.UNKNOWN_COMMAND))
    stream = tested.consumer.streams[0]
    tested.tell(upr.StreamRequestResponse(log=LOG, opaque=request.opaque))  # type: ignore[attr-defined]
    assert tested.tell(marker(stream)) == []


def test_a_producer_that_promised_noops_and_is_silent_is_gone() -> None:
    tested = ConsumerUnderTest(ConsumerOptions(window_bytes=0, noop_interval_s=10, expirations=False))
    tested.add()
    enable = tested.sent()[0]
    assert isinstance(enable, dcp.Control)
    assert tested.consumer.deadline is None
    tested.tell(AnyResponse(opcode=enable.code, opaque=enable.opaque), now=1.0)
    assert tested.consumer.deadline == 21.0
    tested.tell(dcp.Noop(), now=15.0)
    tested.consumer.tick(34.0)
    assert not tested.consumer.closing
    tested.consumer.tick(35.0)
    assert "sent nothing" in tested.consumer.closing


def test_what_is_none_of_a_streams_is_left_to_others() -> None:
    assert not ConsumerUnderTest().consumer.receive(memcached.Stat(), 0.0)


def test_an_answer_to_nothing_is_ignored() -> None:
    assert ConsumerUnderTest().tell(AnyResponse(opcode=0x53, opaque=12345)) == []


# Bytes in any pieces


@given(cuts=st.lists(st.integers(0, 120), max_size=30))
def test_pieces_make_no_difference(cuts: list[int]) -> None:
    tested = ConsumerUnderTest()
    stream = tested.open()
    feeder = PacketFeeder(tested.consumer)
    data = b"".join(
        message.encode()
        for message in (
            marker(stream, end=5),
            *(mutation(stream, seqno) for seqno in (1, 2, 3)),
            memcached.Stat(key=b"dcp"),
            *(mutation(stream, seqno) for seqno in (4, 5)),
            dcp.Noop(opaque=3),
            of(stream, dcp.StreamEnd()),
        )
    )
    at, left = 0, []
    for cut in [*cuts, len(data)]:
        left += feeder.feed(memoryview(data)[at : at + cut], 0.0)
        at += cut
    assert " ".join(tested.copies[0].told[1:]).split() == ["k1", "k2", "k3", "k4", "k5"]
    assert [type(message) for message in left] == [memcached.Stat]
    assert stream.end_reason == "ok"
    assert len(tested.sent()) == 1


def test_a_lost_place_is_an_error() -> None:
    with pytest.raises(WireError):
        PacketFeeder(ConsumerUnderTest().consumer).feed(b"GET / HTTP/1.1\r\n\r\n", 0.0)
