"""What a consumer asks of its store, and that the engine's adapter has all of it."""

from upriver.node.streams.engine_sink import EngineCopy, EngineSink
from upriver.protocol.consumer.sink import Sink, SinkVbucket


def test_the_engine_fits() -> None:
    # mypy checks the signatures; here only that nobody has lost one.
    for wanted, offered in ((Sink, EngineSink), (SinkVbucket, EngineCopy)):
        names = {name for name in vars(wanted) if not name.startswith("_")}
        assert names
        assert names <= set(dir(offered))
