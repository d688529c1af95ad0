"""Every setting, what it takes and what it refuses."""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.errors import InvalidArguments
from upriver.protocol.producer.controls import CONTROLS, VALUE_BYTES_MAX, Controls

GOOD: dict[str, list[tuple[bytes, Any]]] = {
    "enable_noop": [(b"true", True), (b"false", False)],
    "set_noop_interval": [(b"20", 20.0), (b"0.5", 0.5)],
    "connection_buffer_size": [(b"0", 0), (b"4294967295", 2**32 - 1)],
    "enable_expiry_opcode": [(b"true", True)],
    "send_stream_end_on_client_close_stream": [(b"true", True)],
    "set_priority": [(b"high", "high"), (b"low", "low")],
    "backfill_order": [(b"sequential", "sequential")],
    "key_filter": [(b"^user:", "^user:"), (b"", "")],
    "value_filter": [(b'{"field": "a"}', '{"field": "a"}')],
    "keys_only": [(b"true", True)],
    "persisted_only": [(b"true", True)],
    "exact_end": [(b"true", True)],
    "history": [(b"true", True)],
}
BAD = [
    (b"enable_noop", b"yes"),
    (b"set_noop_interval", b"0"),
    (b"set_noop_interval", b"nan"),
    (b"set_noop_interval", b"1e9"),
    (b"set_noop_interval", b"soon"),
    (b"set_noop_interval", b"1_0"),
    (b"set_noop_interval", b" 5\n"),
    (b"set_noop_interval", "٣".encode()),
    (b"set_noop_interval", b"1" * 100_000),
    (b"connection_buffer_size", b"-1"),
    (b"connection_buffer_size", b"4294967296"),
    (b"connection_buffer_size", "٣".encode()),
    (b"connection_buffer_size", b"9" * 100_000),
    (b"connection_buffer_size", b""),
    (b"set_priority", b"urgent"),
    (b"backfill_order", b"random"),
    (b"bogus", b"1"),
    (b"", b""),
    (b"\xff", b"true"),
    (b"keys_only", b"\xff"),
    (b"enable_noop_", b"true"),
    (b"enable", b"true"),
    (b"enable_noop", b"\0" * 50_000),
    (b"set_priority", b"\0" * 50_000),
    (b"\0" * 50_000, b"true"),
    *((name.encode(), b"1" * (VALUE_BYTES_MAX + 1)) for name in GOOD),
]


def test_the_examples_cover_the_table() -> None:
    assert set(GOOD) == set(CONTROLS)
    assert all(control.meaning for control in CONTROLS.values())


@pytest.mark.parametrize(("name", "value", "meant"), [(n, *pair) for n, pairs in GOOD.items() for pair in pairs])
def test_what_makes_sense_is_taken(name: str, value: bytes, meant: object) -> None:
    controls = Controls()
    assert controls[name] == CONTROLS[name].default
    controls.set(*controls.read(name.encode(), value))
    assert controls[name] == meant


@pytest.mark.parametrize(("name", "value"), BAD)
def test_what_makes_no_sense_is_refused(name: bytes, value: bytes) -> None:
    with pytest.raises(InvalidArguments) as refused:
        Controls().read(name, value)
    assert 0 < len(refused.value.detail) < 600, "it says why, and does not send back all that came"


@given(st.sampled_from([*map(str.encode, CONTROLS), b"other"]), st.binary(max_size=12))
def test_nothing_that_a_peer_sends_is_our_error(name: bytes, value: bytes) -> None:
    with suppress(InvalidArguments):
        Controls().read(name, value)
