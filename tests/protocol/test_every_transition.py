"""Every transition of the stream table is driven, on both sides and in every dialect that has a message for it.

Each step of a way is taken by the real thing: a producer over a bucket that packets are taken from one by one, and a
consumer over a paper sink that hears what a producer of the dialect says. A transition of the table for which the
dialect has words and that is never taken fails the test, and so does one that is taken though it should not be.
"""

from collections.abc import Callable, Iterator

import pytest

from tests.support.fake_source import FakeSource
from tests.support.recording_sink import RecordingCopy, RecordingSink
from upriver.errors import NotMyVbucket
from upriver.model import FailoverLog, Snapshot, VbucketState
from upriver.protocol.consumer.consumer import ConsumerConnection, ConsumerOptions
from upriver.protocol.consumer.draft_translation import DraftTranslator
from upriver.protocol.producer import stream_scheduler
from upriver.protocol.producer.dialects import OPENED, STREAM_DIALECTS, StreamDialect, opaque_of, put_opaque, wire_log
from upriver.protocol.producer.producer import Producer
from upriver.protocol.stream_state import TRANSITIONS, StreamEvent, StreamLife, StreamState
from upriver.wire import AnyResponse, Framer, Message, dcp, upr, upr_draft1, upr_draft3

S, E = StreamState, StreamEvent
Transition = tuple[StreamState, StreamEvent]
HANDING_OVER = (S.PENDING, S.DRAINING, S.ACTIVATING)
NOW = 100.0


def possible(dialect: StreamDialect, role: str) -> set[Transition]:
    """Those of the table that the dialect has words for."""
    drafted, opened = dialect.snapshot_end is not None, dialect in OPENED
    # A draft's copies are handed over by its producer only: no consumer of ours takes one over in a draft.
    hands_over = dialect.set_state is not None and (role == "producer" or opened)
    words = {
        E.START: dialect.start is not None,
        E.SNAPSHOT_END: drafted,
        E.ADVANCE: dialect.advanced is not None,
        E.FLUSH: dialect.flush is not None,
        E.SET_PENDING: hands_over,
        # Producers of ours keep the order.
        E.SET_OUT_OF_ORDER: hands_over and role == "consumer",
        # A consumer may always take no more; the drafts have no message for it.
        E.CLOSE: opened or role == "consumer",
    }
    found = {
        (state, event)
        for state, events in TRANSITIONS.items()
        for event in events
        if words.get(event, True) and (hands_over or state not in HANDING_OVER)
    }
    if role == "producer":  # a request that it refuses never becomes a stream
        found -= {(S.REQUESTED, event) for event in (E.REFUSE, E.CLOSE, E.LOSE)}
    if drafted:  # a snapshot has ended before anything but a change or the end of all follows
        found -= {(S.SNAPSHOT, E.MARKER), (S.SNAPSHOT, E.SET_PENDING)}
    return found


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> set[Transition]:
    """Each transition that a stream takes from here on."""
    noted: set[Transition] = set()
    move = StreamLife.move

    def noting(life: StreamLife, event: StreamEvent) -> None:
        before = life.state
        move(life, event)
        noted.add((before, event))

    monkeypatch.setattr(StreamLife, "move", noting)
    monkeypatch.setattr(stream_scheduler, "TURN_BYTES_MIN", 1)
    return noted


class Sending:
    """One stream of a producer, a packet at a time; its consumer answers markers at once and states when told."""

    def __init__(
        self, dialect: StreamDialect, *keys: bytes, takeover: bool = False, key_filter: bytes = b"", dead: bool = False
    ) -> None:
        self.source = FakeSource()
        self.vbucket = self.source.create_vbucket(0)
        self.write(*keys)
        if dead:
            self.vbucket.set_state(VbucketState.DEAD)
        speaks = OPENED if dialect in OPENED else (dialect,)
        self.producer = Producer(self.source, "peer", dcp.OpenFlag.PRODUCER, NOW, speaks=speaks)
        if key_filter:
            self.tell(dcp.Control(key=b"key_filter", value=key_filter))
        request = dialect.request(vbucket=0)  # type: ignore[call-arg]
        if takeover:
            request.flags = dcp.StreamFlag.TAKEOVER  # type: ignore[attr-defined]
        put_opaque(request, 7)
        self.tell(request)
        self.stream = self.producer.streams[0]
        self.takeover = takeover
        self.asked: Message | None = None
        self._framer = Framer(dialect.wire.framing)
        self._wire = dialect.wire if dialect not in OPENED else dcp.dcp

    def tell(self, message: Message) -> None:
        assert self.producer.receive(message, NOW)

    def step(self) -> "Sending":
        """The next packet."""
        self._framer.feed(self.producer.produce(1))
        while packet := self._framer.next_packet():
            message = self._wire.decode(packet)
            if isinstance(message, dcp.SnapshotMarker) and self.takeover:
                self.tell(AnyResponse(opcode=message.code, opaque=7))
            elif isinstance(message, upr.SetVbucketState | upr_draft3.SetVbucketState):
                self.asked = message
        return self

    def to(self, state: StreamState) -> "Sending":
        """Packet after packet until the stream is there."""
        for _ in range(50):
            if self.stream.life.state is state:
                return self
            self.step()
            if state in (S.DRAINING, S.ACTIVATING):
                self.disk()
                if self.asked is not None and self.stream.life.state is S.PENDING:
                    self.answer()
        raise AssertionError(f"the stream stays {self.stream.life.state.value}")

    def answer(self) -> "Sending":
        """The consumer has taken on the state that it was told."""
        assert self.asked is not None
        self.tell(AnyResponse(opcode=self.asked.code, opaque=opaque_of(self.asked)))
        self.asked = None
        return self

    def write(self, *keys: bytes) -> None:
        for key in keys:
            self.vbucket.set(key, b"v")

    def disk(self) -> None:
        while self.source.reach_disk():
            pass

    # What ends it

    def flush(self) -> None:
        self.vbucket.flush()
        self.to(S.ENDED)

    def end(self) -> None:
        """The vbucket gets another role; once everything is handed over, the consumer's answer is the end."""
        if self.stream.life.state is S.ACTIVATING:
            self.answer().disk()
        else:
            self.vbucket.set_state(VbucketState.REPLICA)
        self.to(S.ENDED)

    def close(self) -> None:
        self.tell(upr.CloseStream(vbucket=0, opaque=9))

    def lose(self) -> None:
        self.producer.lose()


def produce_everything(dialect: StreamDialect) -> None:
    """All ways of a producer's stream."""
    hands_over = dialect.set_state is not None
    ends: list[Callable[[Sending], None]] = [Sending.end, Sending.lose]
    ends += [Sending.close] if dialect in OPENED else []
    ends += [Sending.flush] if dialect.flush is not None else []
    for end in ends:
        end(Sending(dialect))
        end(Sending(dialect, b"a", b"b").to(S.SNAPSHOT))
        for state in HANDING_OVER if hands_over else ():
            if not (end is Sending.flush and state is S.ACTIVATING):  # a dead vbucket cannot be flushed
                end(Sending(dialect, b"a", takeover=True).to(state))
    live = Sending(dialect, b"a")
    for _ in range(4):
        live.step()
    live.write(b"b")  # behind a snapshot that was sent
    live.step()
    live.step()
    if dialect.advanced is not None:
        filtered = Sending(dialect, b"a", b"b", key_filter=b"^a")
        for _ in range(4):
            filtered.step()
    if hands_over:
        Sending(dialect, takeover=True).to(S.PENDING)  # nothing was there
        late = Sending(dialect, b"a", takeover=True).to(S.PENDING)
        late.write(b"a", b"b")
        late.to(S.ACTIVATING)
        # A dead copy that still received something, the end of which its sender did not have any more.
        tail = Sending(dialect, b"a", takeover=True, dead=True).to(S.PENDING)
        tail.vbucket.begin_snapshot(3)
        tail.vbucket.apply(2, b"b")
        tail.vbucket.advance(3)
        tail.to(S.ACTIVATING)


@pytest.mark.parametrize("dialect", STREAM_DIALECTS.values(), ids=lambda dialect: dialect.name)
def test_a_producer_takes_every_transition(dialect: StreamDialect, taken: set[Transition]) -> None:
    produce_everything(dialect)
    assert taken == possible(dialect, "producer")


class Receiving:
    """One stream of a consumer, which hears what a producer of the dialect says."""

    def __init__(self, dialect: StreamDialect, taken: set[Transition]) -> None:
        self.dialect = dialect
        self.taken = taken
        self.sink = RecordingSink(RecordingCopy())
        spoken = "dcp" if dialect.name == "dcp" else "upr"
        self.consumer = ConsumerConnection(self.sink, NOW, ConsumerOptions(dialects=(spoken,)))
        self.translator = None if dialect in OPENED else DraftTranslator(dialect.name)
        self.stream = self.consumer.add_stream(0, lambda _, error: self.answers.append(error), flags=1)
        self.answers: list[object] = []
        self.seqno = 0
        self._translate_sent()

    def _translate_sent(self) -> None:
        """A translator knows what its consumer has asked."""
        framer = Framer(dcp.dcp.framing)
        framer.feed(self.consumer.data_to_send())
        while packet := framer.next_packet():
            if self.translator is not None:
                self.translator.outgoing(dcp.dcp.decode(packet))

    def hear(self, packet: bytes) -> "Receiving":
        said = self.dialect.wire.decode(packet)
        state, before = self.stream.life.state, self.stream.changes_received
        for message in [said] if self.translator is None else self.translator.incoming(said):
            assert self.consumer.receive(message, NOW)
        if self.stream.changes_received > before:  # a run of changes asks for the state, and moves nothing
            self.taken.add((state, E.CHANGE))
        self._translate_sent()
        return self

    def say(self, message: Message) -> "Receiving":
        return self.hear(self.dialect.addressed(message, 0, self.stream.opaque))

    def compare(self) -> "Receiving":
        """A consumer of another dialect than `dcp` asks for the log first."""
        if self.dialect.name != "dcp":
            self._answer(self.dialect.failover_log(wire_log(FailoverLog.fresh(5))))
        return self

    def _answer(self, answer: Message, *, again: bool = False) -> None:
        put_opaque(answer, self.stream.opaque | (0x80000000 if again else 0))
        self.hear(answer.encode())

    def to(self, state: StreamState) -> "Receiving":
        self.compare()
        self.hear(self.dialect.accepted(FailoverLog.fresh(5), self.stream.opaque))
        if self.translator is not None:  # which asks for the log once more
            self._answer(self.dialect.failover_log(wire_log(FailoverLog.fresh(5))), again=True)
        if self.dialect.start is not None:
            self.say(self.dialect.start())
        if state is S.SNAPSHOT:
            self.marker()
        elif state in HANDING_OVER:
            self.state(VbucketState.PENDING)
            if state is not S.PENDING:
                self.sink.reach_disk()
            if state is S.ACTIVATING:
                self.state(VbucketState.ACTIVE)
        assert self.stream.life.state is state
        return self

    def marker(self) -> "Receiving":
        marker = self.dialect.marker(0, self.stream.opaque)
        return self.hear(marker(Snapshot(self.seqno, self.seqno + 2), lambda: 1))

    def change(self) -> "Receiving":
        self.seqno += 1
        classes = {"dcp": dcp.Mutation, "upr": upr.Mutation, "upr_draft3": upr_draft3.Mutation}
        kind = classes.get(self.dialect.name, upr_draft1.Mutation)
        return self.say(kind(by_seqno=self.seqno, key=b"k%d" % self.seqno))

    def state(self, state: VbucketState) -> "Receiving":
        assert self.dialect.set_state is not None
        return self.say(self.dialect.set_state(state))

    # What ends it, or empties it

    def flush(self) -> None:
        assert self.dialect.flush is not None
        self.say(self.dialect.flush())

    def end(self) -> None:
        self.say(self.dialect.end(0))

    def close(self) -> None:
        self.consumer.close_stream(0)

    def lose(self) -> None:
        self.consumer.lose()

    def refuse(self) -> None:
        self.compare()
        request = self.dialect.request(vbucket=0)  # type: ignore[call-arg]
        self._answer(self.dialect.refused(request, NotMyVbucket()))


def consume_everything(dialect: StreamDialect, taken: set[Transition]) -> None:
    """All ways of a consumer's stream."""

    def fresh() -> Receiving:
        return Receiving(dialect, taken)

    states = (S.OPEN, S.SNAPSHOT, *(HANDING_OVER if dialect in OPENED else ()))
    for end in (Receiving.refuse, Receiving.close, Receiving.lose):
        end(fresh())
    for state in states:
        for end in (Receiving.end, Receiving.close, Receiving.lose):
            end(fresh().to(state))
        if dialect.flush is not None and E.FLUSH in TRANSITIONS[state]:
            fresh().to(state).flush()
    inside = fresh().to(S.SNAPSHOT).change()
    if dialect.snapshot_end is not None:
        inside.change().say(dialect.snapshot_end())
    elif dialect.advanced is not None:
        inside.say(dialect.advanced(2))
        inside.seqno = 2
        inside.marker()
    else:
        inside.marker()
    if dialect in OPENED:
        fresh().to(S.SNAPSHOT).change().change().state(VbucketState.PENDING)
        for state in states:
            fresh().to(state).state(VbucketState.REPLICA)
        draining = fresh().to(S.DRAINING).marker().change()
        if dialect.advanced is not None:
            draining.say(dialect.advanced(2))


@pytest.mark.parametrize("dialect", STREAM_DIALECTS.values(), ids=lambda dialect: dialect.name)
def test_a_consumer_takes_every_transition(dialect: StreamDialect, taken: set[Transition]) -> None:
    consume_everything(dialect, taken)
    assert taken == possible(dialect, "consumer")


def every_possible() -> Iterator[Transition]:
    for dialect in STREAM_DIALECTS.values():
        for role in ("producer", "consumer"):
            yield from possible(dialect, role)


def test_no_transition_is_left_out_by_all() -> None:
    assert set(every_possible()) == {(state, event) for state, events in TRANSITIONS.items() for event in events}
