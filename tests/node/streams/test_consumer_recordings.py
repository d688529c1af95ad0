"""The recordings in which a server consumes, replayed: mover and producer say the same, our node answers the same.

The mover and the producer of the test answer what the recorded server had asked. So each opaque of the recorded server
is replaced by the one that ours has chosen for the same request. Acknowledgements of bytes are not compared one by one,
because a consumer may choose when to send them; but all received bytes must be acknowledged in the end.
"""

import pytest

from tests.support.recorded_differences import CONSUMER_DIFFERENCES, check_reasons, wanted
from tests.support.recording_replay import ConsumerReplay, consumer_recordings


def test_there_are_recordings() -> None:
    assert consumer_recordings() == ["cons_01_add_stream", "cons_03_relay_takeover"]


@pytest.mark.parametrize("recording", consumer_recordings())
def test_the_same_peer_gets_the_same_messages(recording: str) -> None:
    replay = ConsumerReplay(recording)
    assert replay.differences() == wanted(CONSUMER_DIFFERENCES, recording)


@pytest.mark.parametrize("recording", consumer_recordings())
def test_everything_that_was_received_is_acknowledged_in_the_end(recording: str) -> None:
    replay = ConsumerReplay(recording)
    replay.pass_by(10.0)
    for recorded, ours in replay.acknowledged():
        assert ours >= recorded > 0


def test_every_difference_has_its_reason_and_belongs_to_a_recording() -> None:
    check_reasons(CONSUMER_DIFFERENCES, consumer_recordings())
