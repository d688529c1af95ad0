"""Every recording of a producing server, replayed: the same client gets the same messages from us."""

import pytest

from tests.protocol.recorded_differences import DIFFERENCES
from tests.protocol.replay import Replay, recordings
from upriver.wire import AnyResponse
from upriver.wire.codes import Status


def test_there_are_recordings() -> None:
    assert len(recordings()) == 15


@pytest.mark.parametrize("recording", recordings())
def test_the_same_client_gets_the_same_messages(recording: str) -> None:
    replay = Replay(recording)
    wanted = {
        (difference.connection, difference.vbucket): list(difference.lines)
        for difference in DIFFERENCES
        if difference.recording == recording
    }
    assert replay.differences() == wanted


@pytest.mark.parametrize("recording", recordings())
def test_every_refusal_says_why(recording: str) -> None:
    for conversation in Replay(recording).ours.values():
        for message in conversation.messages:
            if isinstance(message, AnyResponse) and message.status is not Status.SUCCESS:
                assert message.text, message


def test_every_difference_has_its_reason_and_belongs_to_a_recording() -> None:
    assert all(difference.why.endswith(".") for difference in DIFFERENCES)
    assert {difference.recording for difference in DIFFERENCES} <= set(recordings())
