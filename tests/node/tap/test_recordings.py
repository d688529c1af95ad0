"""Every recording of TAP, replayed: the same client gets the same messages from us, but for what we want otherwise."""

import pytest

from tests.support.recorded_differences import check_reasons, check_refusals, wanted
from tests.support.tap_recorded_differences import DIFFERENCES
from tests.support.tap_recording_replay import TapReplay, recordings


def test_there_are_recordings() -> None:
    assert len(recordings()) == 7


@pytest.mark.parametrize("recording", recordings())
def test_the_same_client_gets_the_same_messages(recording: str) -> None:
    replay = TapReplay(recording)
    assert replay.differences() == wanted(DIFFERENCES, recording)
    for conversation in replay.ours.values():
        check_refusals(conversation.messages)


def test_every_difference_has_its_reason_and_belongs_to_a_recording() -> None:
    check_reasons(DIFFERENCES, recordings())
