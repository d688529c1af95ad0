"""A session in turns: however it is fed, paused and resumed, it answers everything once, in order, and holds little."""

from hypothesis import given
from hypothesis import strategies as st

from tests.node.peer import decoded, encoded, open_rig
from upriver.node.session import Session
from upriver.node.state import Limits
from upriver.wire import Request
from upriver.wire.memcached import Get, GetQ, Noop, QuitQ, Set, Stat

SMALL = Limits(unread_answer_bytes_max=500, turn_requests_max=3, waiting_answers_max=4)

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
    plain = open_rig(compiled=compiled)
    turns = open_rig(compiled=compiled, ack="disk" if disk else "memory", limits=SMALL)
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
    rig = open_rig(limits=Limits(turn_requests_max=10))
    with rig.bucket:
        session = Session(rig.node, "peer")
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


def test_a_turn_ends_after_so_many_bytes_of_answers() -> None:
    for compiled in (False, True):
        rig = open_rig(compiled=compiled, limits=Limits(unread_answer_bytes_max=10_000))
        with rig.bucket:
            session = Session(rig.node, "peer")
            session.receive(encoded(Set(key=b"key", value=b"v" * 1000), *[Get(key=b"key")] * 1000))
            assert session.stalled
            assert 10_000 <= len(session.data_to_send()) < 10_000 + 3 * 1100


def test_nothing_behind_a_quit_is_answered_and_nothing_before_it_is_lost() -> None:
    rig = open_rig(ack="disk")
    with rig.bucket:
        session = Session(rig.node, "peer")
        session.receive(encoded(Set(key=b"key", value=b"value", opaque=1), Noop(opaque=2), QuitQ(), Noop(opaque=3)))
        assert session.closing
        assert not session.finished
        assert session.data_to_send() == b""
        rig.commit()
        assert session.finished
        assert [answer.opaque for answer in decoded(session.data_to_send())] == [1, 2]
