"""Every recording of a producing server, replayed: the same client gets the same messages from us."""

import pytest

from tests.support.recorded_differences import DIFFERENCES, check_reasons, check_refusals, wanted
from tests.support.recording_replay import Replay, recordings


def test_there_are_recordings() -> None:
    assert len(recordings()) == 15


@pytest.mark.parametrize("recording", recordings())
def test_the_same_client_gets_the_same_messages(recording: str) -> None:
    replay = Replay(recording)
    assert replay.differences() == wanted(DIFFERENCES, recording)


@pytest.mark.parametrize("recording", recordings())
def test_every_refusal_says_why(recording: str) -> None:
    for conversation in Replay(recording).ours.values():
        check_refusals(conversation.messages)


def test_every_difference_has_its_reason_and_belongs_to_a_recording() -> None:
    check_reasons(DIFFERENCES, recordings())
