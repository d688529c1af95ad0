"""What a consumer asks of its store."""

from tests.support.recording_sink import RecordingCopy, RecordingSink
from upriver.protocol.consumer.sink import Sink, SinkVbucket


def test_the_recording_sink_has_all_that_a_consumer_needs() -> None:
    for wanted, offered in ((Sink, RecordingSink()), (SinkVbucket, RecordingCopy())):
        names = {name for name in vars(wanted) if not name.startswith("_")}
        assert names
        assert names <= set(dir(offered))
