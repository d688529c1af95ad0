"""Streams and TAP peers do not feed the same copy."""

import pytest

from upriver.errors import KeyExists
from upriver.node.streams.fed_copies import FedCopies

PEER, OTHER = object(), object()


def test_a_stream_keeps_other_streams_and_tap_peers_out() -> None:
    fed = FedCopies()
    fed.open_stream(1)
    for refused, arguments in ((fed.open_stream, (1,)), (fed.note_peer, (1, PEER)), (fed.check_no_stream, (1,))):
        with pytest.raises(KeyExists):
            refused(*arguments)
    assert fed.has_stream(1)
    assert not fed.has_stream(2)
    fed.note_peer(2, PEER)
    fed.close_stream(1)
    fed.note_peer(1, PEER)


def test_tap_peers_keep_streams_out_until_the_last_is_gone() -> None:
    fed = FedCopies()
    fed.note_peer(1, PEER)
    fed.note_peer(1, OTHER)
    fed.note_peer(2, PEER)
    fed.forget_peer(PEER)
    fed.open_stream(2)
    with pytest.raises(KeyExists):
        fed.open_stream(1)
    fed.forget_peer(OTHER)
    fed.open_stream(1)


def test_what_is_no_copy_any_more_has_no_peers() -> None:
    fed = FedCopies()
    fed.note_peer(1, PEER)
    fed.end_peers(1)
    fed.open_stream(1)
    fed.forget_peer(PEER)
