"""A session in turns: however it is fed, paused and resumed, it answers everything once, in order, and holds little."""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.command_peers import STATES, VBUCKETS, assert_refusal, decoded, encoded, open_manual_node
from upriver.node.auth.users import Role
from upriver.node.commands.observe import OBSERVED_KEYS_MAX
from upriver.node.commands.statistics import GROUPS
from upriver.node.session import Session
from upriver.node.state import Limits
from upriver.wire import Request
from upriver.wire.codes import Status
from upriver.wire.dialects.memcached import (
    Feature,
    Get,
    GetAllVbucketSeqnos,
    GetQ,
    Hello,
    Noop,
    Observe,
    ObservedKey,
    Quit,
    QuitQ,
    Set,
    Stat,
    StatResponse,
    Touch,
)

SMALL = Limits(unread_answer_bytes_max=500, turn_work_max=3, waiting_answers_max=4)

KEYS = st.sampled_from([b"a", b"b", b"c"])
REQUESTS = st.lists(
    st.one_of(
        st.builds(Get, key=KEYS),
        st.builds(GetQ, key=KEYS),
        st.builds(Set, key=KEYS, value=st.integers(0, 300).map(lambda size: b"v" * size)),
        st.just(Noop()),
        st.just(Stat(key=b"vbucket")),
    ),
    max_size=40,
)


def numbered(requests: list[Request]) -> bytes:
    packets = []
    for number, request in enumerate(requests):
        packet = bytearray(request.encode())
        packet[12:16] = number.to_bytes(4, "big")
        packets.append(bytes(packet))
    return b"".join(packets)


def answers_of(data: bytes) -> list[tuple[int, int, bytes]]:
    """Everything but the CAS, which is another in each bucket."""
    return [(answer.code, answer.opaque, answer.encode()[24:]) for answer in decoded(data)]


@given(
    requests=REQUESTS,
    cuts=st.lists(st.integers(1, 200), min_size=1, max_size=20),
    pauses=st.lists(st.booleans(), min_size=1, max_size=20),
    compiled=st.booleans(),
    disk=st.booleans(),
)
def test_pauses_lose_nothing_and_keep_the_order(
    requests: list[Request], cuts: list[int], pauses: list[bool], compiled: bool, disk: bool
) -> None:
    data = numbered(requests)
    plain = open_manual_node(compiled=compiled)
    turns = open_manual_node(compiled=compiled, ack="disk" if disk else "memory", limits=SMALL)
    with plain.bucket, turns.bucket:
        whole = Session(plain.node, "whole")
        whole.receive(data)
        expected = whole.data_to_send()
        while whole.stalled:
            whole.resume()
            expected += whole.data_to_send()

        session, sent, out, step = Session(turns.node, "turns"), 0, b"", 0
        while sent < len(data) or session.stalled or session.waiting:
            step += 1
            assert step < 10_000
            # As the shell does it: it reads only when everything is answered and the peer reads.
            session.paused = pauses[step % len(pauses)] and step < 500
            if session.stalled:
                if not session.blocked:
                    session.resume()
                elif session.waiting:
                    turns.commit()
            elif not session.paused and sent < len(data):
                size = cuts[step % len(cuts)]
                session.receive(memoryview(data[sent : sent + size]))
                sent += size
            else:
                turns.commit()
            # One request's answer, and what one run of the compiled loop may give, at most beyond the limit.
            assert session.held_bytes < 3 * SMALL.unread_answer_bytes_max + 2 * max(
                len(encoded(Noop())), 24 + 4 + 300 + 600
            )
            out += session.data_to_send()
        assert answers_of(out) == answers_of(expected)


def test_a_turn_ends_after_so_many_requests() -> None:
    manual = open_manual_node(limits=Limits(turn_work_max=10))
    with manual.bucket:
        session = Session(manual.node, "peer")
        session.receive(encoded(*[Noop()] * 25))
        assert session.stalled
        assert len(decoded(session.data_to_send())) == 10
        session.receive(encoded(Noop(opaque=9)))  # what comes too early waits its turn
        assert session.data_to_send() == b""
        session.resume()
        assert len(decoded(session.data_to_send())) == 10
        session.resume()
        assert [answer.opaque for answer in decoded(session.data_to_send())] == [0] * 5 + [9]
        assert not session.stalled


def test_a_turn_ends_after_some_time_whatever_the_requests_are() -> None:
    """A touch of a large value copies all of it, which neither its request nor its answer shows."""
    manual = open_manual_node(limits=Limits(turn_s=1.0))

    def turns_of(*requests: Request) -> list[int]:
        session.receive(encoded(*requests))
        answered = [len(decoded(session.data_to_send()))]
        while session.stalled:
            session.resume()
            answered.append(len(decoded(session.data_to_send())))
        return answered

    with manual.bucket:
        session = Session(manual.node, "peer")
        assert turns_of(Set(key=b"key", value=b"v")) == [1]
        touch = Touch(key=b"key", expiration=9)
        manual.node.ticks = itertools.count(0, 0.3).__next__  # it looks once for each request
        assert turns_of(*[touch] * 10) == [4, 4, 2]
        manual.node.ticks = itertools.count(0, 7).__next__  # each takes longer than a turn
        assert turns_of(*[touch] * 3) == [1, 1, 1]
        packets = turns_of(Stat(key=b"vbucket"), touch)
        assert max(packets) == 1
        assert sum(packets) == len(STATES) + 1 + 1


def test_a_turn_ends_sooner_after_requests_that_cost_more() -> None:
    manual = open_manual_node(limits=Limits(turn_work_max=100))
    with manual.bucket:
        session = Session(manual.node, "peer")
        session.receive(encoded(*[Stat(key=b"vbucket-details")] * 10, Noop(opaque=9)))
        pairs = len(decoded(session.data_to_send()))
        turns = 1
        while session.stalled:
            session.resume()
            answers = decoded(session.data_to_send())
            turns += 1
        assert pairs < 3 * 60
        assert 4 <= turns <= 10
        assert answers[-1].opaque == 9
        observe = Observe(keys=tuple(ObservedKey(vbucket=0, key=b"%d" % number) for number in range(50)))
        session.receive(encoded(*[observe] * 4))
        assert len(decoded(session.data_to_send())) == 2
        assert session.stalled


@pytest.mark.parametrize(
    "request_", [Stat(), Stat(key=b"memory"), Stat(key=b"vbucket-positions"), GetAllVbucketSeqnos()]
)
def test_what_looks_at_every_vbucket_ends_a_turn(request_: Request) -> None:
    manual = open_manual_node(limits=Limits(turn_work_max=VBUCKETS))
    with manual.bucket:
        session = Session(manual.node, "peer")
        session.receive(encoded(*[request_] * 3, Noop(opaque=9)))
        turns, answers = 1, decoded(session.data_to_send())
        while session.stalled:
            session.resume()
            turns += 1
            answers += decoded(session.data_to_send())
        assert turns >= 4
        assert answers[-1].opaque == 9


def test_a_long_answer_takes_turns() -> None:
    """Nothing of it is lost or overtaken, and it stops for a peer that does not read."""
    manual = open_manual_node(limits=Limits(turn_work_max=10))
    with manual.bucket:
        peer, session = manual.peer(), Session(manual.node, "peer")
        expected = [answer.encode() for answer in peer.send(Stat(key=b"vbucket-details", opaque=1))]
        assert len(expected) > 50
        session.receive(encoded(Stat(key=b"vbucket-details", opaque=1), Noop(opaque=2), Quit(opaque=3)))
        packets = decoded(session.data_to_send())
        assert 5 <= len(packets) <= 10
        session.paused = True
        while session.stalled:
            if session.paused:
                assert session.blocked
            session.resume()
            more = decoded(session.data_to_send())
            assert 1 <= len(more) <= 10
            assert session.finished is (not session.stalled)
            packets += more
        assert [packet.encode() for packet in packets[:-2]] == expected
        assert [packet.opaque for packet in packets[-2:]] == [2, 3]


def test_a_peer_that_is_disconnected_gets_its_long_answer_to_the_end() -> None:
    manual = open_manual_node(limits=Limits(turn_work_max=10))
    with manual.bucket:
        session = Session(manual.node, "peer")
        session.receive(encoded(Stat(key=b"vbucket-details")))
        session.closing = True
        assert not session.finished
        while session.stalled:
            session.resume()
        assert session.finished
        assert decoded(session.data_to_send())[-1] == StatResponse()


def test_an_answer_that_breaks_off_closes_the_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> Iterator[tuple[str, object]]:
        yield "first", 1
        raise RuntimeError("a mistake of ours")

    manual = open_manual_node()
    monkeypatch.setitem(GROUPS, "broken", (broken, Role.READ))
    with manual.bucket:
        session = Session(manual.node, "peer")
        session.receive(encoded(Stat(key=b"broken"), Noop(opaque=9)))
        assert [answer.status for answer in decoded(session.data_to_send())] == [Status.SUCCESS]
        assert session.finished
    assert "a mistake of ours" in caplog.text


def test_what_lists_too_much_is_refused_before_it_is_taken_apart() -> None:
    manual = open_manual_node()
    with manual.bucket:
        peer = manual.peer()
        many = tuple(ObservedKey(vbucket=0, key=b"k") for _ in range(OBSERVED_KEYS_MAX + 1))
        assert f"send at most {OBSERVED_KEYS_MAX}" in peer.refused(Observe(keys=many), Status.EINVAL)
        assert peer.ask(Observe(keys=many[1:])).status is Status.SUCCESS
        too_long = tuple(ObservedKey(vbucket=0, key=b"k" * 250) for _ in range(300))
        assert "ask for less" in peer.refused(Observe(keys=too_long), Status.E2BIG)
        assert "ask for less" in peer.refused(Hello(features=(Feature.JSON,) * 513), Status.E2BIG)
        assert peer.ask(Noop()).status is Status.SUCCESS


def test_the_peer_that_has_held_half_a_request_for_longest_makes_room(caplog: pytest.LogCaptureFixture) -> None:
    manual = open_manual_node(limits=Limits(partial_bytes_max=10_000))
    whole = Set(key=b"key", value=b"v" * 6000, opaque=5).encode()
    half = whole[:6000]
    with manual.bucket:
        first, second, third, small = (manual.peer() for _ in range(4))
        small.send(half[:100])
        manual.time.pass_by(1000)
        assert first.send(half[:3000]) == []
        manual.time.pass_by(5)
        assert first.send(half[3000:]) == []
        assert manual.node.partial.total_bytes == 6100
        assert second.send(half) == []
        (answer,) = first.receive()
        assert_refusal(answer, Status.ENOMEM)
        assert answer.opaque == 5
        assert first.session.closing
        assert first.wakes == 1
        assert len(caplog.records) == 1
        assert "half-received requests" in caplog.text
        assert manual.node.partial.total_bytes == 6100
        (answer,) = second.send(whole[6000:])
        assert answer.status is Status.SUCCESS
        assert not small.session.closing  # however long it takes, it is within its share
        assert manual.node.partial.total_bytes == 100
        third.send(half)
        third.session.end()
        assert manual.node.partial.total_bytes == 100


def test_a_peer_that_only_waits_for_its_turn_makes_no_room() -> None:
    """Requests that a session has left for a later turn are not half requests; no peer is refused for them."""
    manual = open_manual_node(limits=Limits(partial_bytes_max=10_000, turn_work_max=1))
    with manual.bucket:
        busy, other = Session(manual.node, "busy"), manual.peer()
        busy.receive(encoded(*[Set(key=b"key", value=b"v" * 3000)] * 4))
        assert busy.stalled
        manual.time.pass_by(1000)
        large = Set(key=b"key", value=b"v" * 8000).encode()
        assert other.send(large[:2000]) == []  # it is within its share
        (answer,) = other.send(large[2000:6000])
        assert_refusal(answer, Status.ENOMEM)
        assert not busy.closing
        while busy.stalled:
            busy.resume()
        assert len(decoded(busy.data_to_send())) == 4
        assert manual.node.partial.total_bytes == 0


def test_a_turn_ends_after_so_many_bytes_of_answers() -> None:
    for compiled in (False, True):
        manual = open_manual_node(compiled=compiled, limits=Limits(unread_answer_bytes_max=10_000))
        with manual.bucket:
            session = Session(manual.node, "peer")
            session.receive(encoded(Set(key=b"key", value=b"v" * 1000), *[Get(key=b"key")] * 1000))
            assert session.stalled
            assert 10_000 <= len(session.data_to_send()) < 10_000 + 1100


def test_one_large_answer_fills_a_turn() -> None:
    """However it is received: the requests after it wait until it is read."""
    for compiled in (False, True):
        manual = open_manual_node(compiled=compiled, limits=Limits(unread_answer_bytes_max=10_000))
        with manual.bucket:
            session, large = Session(manual.node, "peer"), 24 + 4 + 50_000
            session.receive(encoded(Set(key=b"key", value=bytes(50_000))))
            session.data_to_send()
            pipeline = encoded(*[Get(key=b"key")] * 3, Noop())
            assert session.serve(pipeline, len(pipeline)) == (None, [])
            assert session.stalled
            turns = [len(session.data_to_send())]
            while session.stalled:
                session.resume()
                turns.append(len(session.data_to_send()))
            assert turns == [large, large, large, 24]
            session.receive(pipeline)
            assert len(session.data_to_send()) == large


def test_nothing_behind_a_quit_is_answered_and_nothing_before_it_is_lost() -> None:
    manual = open_manual_node(ack="disk")
    with manual.bucket:
        session = Session(manual.node, "peer")
        session.receive(encoded(Set(key=b"key", value=b"value", opaque=1), Noop(opaque=2), QuitQ(), Noop(opaque=3)))
        assert session.closing
        assert not session.finished
        assert session.data_to_send() == b""
        manual.commit()
        assert session.finished
        assert [answer.opaque for answer in decoded(session.data_to_send())] == [1, 2]
