"""What a stream holds unless a consumer asks for less."""

from upriver.protocol.producer.source import StreamOptions


def test_a_stream_is_plain_unless_told_otherwise() -> None:
    options = StreamOptions()
    assert not any((options.keys_only, options.persisted_only, options.exact_end, options.history))
    assert options.key_filter == options.value_filter == ""
