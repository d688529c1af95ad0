"""What all connections of a node share."""

import dataclasses

from upriver.node.options import NodeOptions
from upriver.node.state import Counters, Limits


def test_the_limits_of_a_node_without_options_are_the_limits_of_a_session_without_a_node() -> None:
    limits, options = Limits(), NodeOptions()
    assert limits.connections_max == options.connections_max
    assert limits.body_bytes_max == options.body_bytes_max
    assert limits.unread_answer_bytes_max == options.unread_bytes_max
    assert limits.unread_total_bytes_max == options.unread_total_bytes_max
    assert limits.partial_bytes_max == options.partial_bytes_max
    assert limits.idle_s == options.idle_s
    assert limits.stuck_s == options.stuck_s
    assert limits.tls_handshake_s == options.tls_handshake_s


def test_counters_start_at_zero() -> None:
    assert not any(dataclasses.asdict(Counters()).values())
