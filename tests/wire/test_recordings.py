"""Every packet that was recorded from real servers, held against the declared messages."""

import pytest

from tests.support.transcripts import packets_of, recordings, unfaithful

#: The only packets that do not come back byte for byte, and what becomes of them.
EXCEPTIONS = {
    "dcp_01_open": {
        # Sent on purpose with extras of 4 bytes; the recorded server answered EINVAL.
        "8050000104000000000000050000000400000000000000000000000178": (
            "at byte 4: expected 8 bytes of extras in open, found 4"
        ),
    },
    "dcp_06_errors": {
        # Sent on purpose with a key; the recorded server answered EINVAL.
        "80530003300000070000003300000013000000000000000000000000000000000000000000000000"
        "ffffffffffffffff000000000000000000000000000000000000000000000000677270": (
            "at byte 2: expected no key in stream request, found a key of 3 bytes"
        ),
    },
    "upr2014_03_state_takeover": {
        # The builds of 2014 acknowledged bytes in the value; we do it in the extras, like every later build.
        "805d000000000000000000040000000200000000000000000000003c": (
            "805d000004000000000000040000000200000000000000000000003c"
        ),
        "805d00000000000000000004000000030000000000000000000001f4": (
            "805d00000400000000000004000000030000000000000000000001f4"
        ),
    },
}


@pytest.mark.parametrize("recording", recordings())
def test_recorded_packets_are_encoded_as_they_came(recording: str) -> None:
    assert unfaithful(recording) == EXCEPTIONS.get(recording, {})


def test_no_recording_is_left_out() -> None:
    names = recordings()
    assert len(names) == 24
    assert sum(1 for name in names for _ in packets_of(name)) == 1348
