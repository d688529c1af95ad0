"""The table: every transition that it has, and that every other one is a violation."""

import itertools

import pytest

from upriver.errors import ProtocolViolation
from upriver.protocol.stream_state import TRANSITIONS, StreamEvent, StreamLife, StreamState, diagram

LEGAL = {
    "requested": {"accept": "open", "refuse": "ended", "close stream": "ended", "connection lost": "ended"},
    "open": {
        "stream start": "open",
        "snapshot marker": "in a snapshot",
        "flush": "open",
        "set vbucket state pending": "handing over: pending",
    },
    "in a snapshot": {
        "snapshot marker": "in a snapshot",
        "change": "in a snapshot",
        "seqno advanced": "in a snapshot",
        "snapshot end": "open",
        "flush": "open",
        "set vbucket state pending": "handing over: pending",
    },
    "handing over: pending": {"answer to pending": "handing over: draining", "flush": "handing over: pending"},
    "handing over: draining": {
        "snapshot marker": "handing over: draining",
        "change": "handing over: draining",
        "seqno advanced": "handing over: draining",
        "snapshot end": "handing over: draining",
        "flush": "handing over: draining",
        "set vbucket state active": "handing over: active",
    },
    "handing over: active": {},
    "ended": {},
}
for _state in ("open", "in a snapshot", "handing over: pending", "handing over: draining", "handing over: active"):
    LEGAL[_state] |= {"stream end": "ended", "close stream": "ended", "connection lost": "ended"}
    LEGAL[_state] |= {"set vbucket state out of order": "handing over: draining"}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(StreamState, StreamEvent)), ids=str)
def test_each_event_in_each_state(state: StreamState, event: StreamEvent) -> None:
    life = StreamLife(7)
    life.state = state
    following = LEGAL[state.value].get(event.value)
    if following is None:
        with pytest.raises(ProtocolViolation) as violation:
            life.move(event)
        assert (violation.value.vbucket, violation.value.event, violation.value.state) == (7, event.value, state.value)
        assert life.state is state
    else:
        life.move(event)
        assert life.state.value == following
        assert life.ended is (following == "ended")


def test_every_state_can_be_reached_and_left() -> None:
    reached = {StreamState.REQUESTED}
    for _ in StreamState:
        reached |= {target for state in reached for target in TRANSITIONS[state].values()}
    assert reached == set(StreamState)
    assert all(StreamState.ENDED in TRANSITIONS[state].values() for state in StreamState if state.name != "ENDED")


def test_the_diagram_draws_each_transition_of_the_table() -> None:
    lines = diagram().splitlines()
    assert lines[0] == "stateDiagram-v2"
    for state, events in TRANSITIONS.items():
        for event, target in events.items():
            (line,) = [line for line in lines if line.strip().startswith(f"{state.name} --> {target.name}:")]
            assert event.value in line.split(": ", 1)[1].split(", ")
