"""What a producer asks of its store, and that the engine's adapter has all of it."""

from upriver.engine import Vbucket
from upriver.node.streams.engine_source import EngineHistory, EngineSource
from upriver.protocol.producer.source import History, Source, SourceVbucket, StreamOptions


def test_the_engine_fits() -> None:
    # mypy checks the signatures; here only that nobody has lost one.
    for wanted, offered in ((History, EngineHistory), (Source, EngineSource)):
        names = {name for name in vars(wanted) if not name.startswith("_")}
        attributes = {
            "bytes_filtered",
            "begins_checkpoint",
            "changes_read",
            "end_reason",
            "expirations_read",
            "from_disk",
            "last_read_seqno",
            "seqno",
            "snapshot",
        }
        assert names - attributes <= set(dir(offered))
    assert {name for name in vars(SourceVbucket) if not name.startswith("_")} - set(dir(Vbucket)) == {
        "flush_marks",
        "flush_ttl",
        "successor",
        "number",
        "state",
        "streamable",
    }  # plain attributes


def test_a_stream_is_plain_unless_told_otherwise() -> None:
    options = StreamOptions()
    assert not any((options.keys_only, options.persisted_only, options.exact_end, options.history))
    assert options.key_filter == options.value_filter == ""
