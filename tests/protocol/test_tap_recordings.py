"""Every recording of TAP, replayed: the same client gets the same messages from us, but for what we want otherwise."""

import pytest

from tests.protocol.tap_recorded_differences import DIFFERENCES
from tests.protocol.tap_replay import TapReplay, recordings
from upriver.wire import AnyResponse
from upriver.wire.codes import Status


def test_there_are_recordings() -> None:
    assert len(recordings()) == 7


@pytest.mark.parametrize("recording", recordings())
def test_the_same_client_gets_the_same_messages(recording: str) -> None:
    replay = TapReplay(recording)
    wanted = {
        (difference.connection, difference.vbucket): list(difference.lines)
        for difference in DIFFERENCES
        if difference.recording == recording
    }
    assert replay.differences() == wanted
    for conversation in replay.ours.values():
        for message in conversation.messages:
            if isinstance(message, AnyResponse) and message.status is not Status.SUCCESS:
                assert message.text, message


def test_every_difference_has_its_reason_and_belongs_to_a_recording() -> None:
    assert all(difference.why.endswith(".") for difference in DIFFERENCES)
    assert {difference.recording for difference in DIFFERENCES} <= set(recordings())
