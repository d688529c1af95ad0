"""The tables that drive the columnar codecs follow from the declarations."""

from typing import Any

import pytest

from upriver.model import CHANGES, Event
from upriver.wire import DIALECTS, dcp, tap, upr_draft2
from upriver.wire.codec.row_layout import TRANSPORT, FieldPlace, field_column, row_layouts, row_templates
from upriver.wire.framing import DRAFT, MEMCACHED


def test_every_kind_of_change_of_dcp_has_a_layout_inherited_ones_included() -> None:
    found = {(row.opcode, row.fixed_length): row.event for row in row_layouts(dcp.dcp)}
    assert found == {
        (0x57, 30): Event.MUTATION,
        (0x57, 31): Event.MUTATION,
        (0x58, 18): Event.DELETION,
        (0x58, 21): Event.DELETION,
        (0x59, 18): Event.EXPIRATION,
        (0x59, 20): Event.EXPIRATION,
    }


def test_a_dialect_overrides_the_layouts_that_it_inherits() -> None:
    by_length = {(row.opcode, row.fixed_length): row.message for row in row_layouts(dcp.dcp)}
    assert by_length[0x57, 31] is dcp.Mutation
    assert by_length[0x58, 18] is dcp.Deletion


def test_places_are_offsets_in_the_packet() -> None:
    (mutation,) = [row for row in row_layouts(dcp.dcp) if (row.opcode, row.fixed_length) == (0x57, 31)]
    assert mutation.places == {
        "datatype": FieldPlace(5, 1),
        "vbucket": FieldPlace(6, 2),
        "opaque": FieldPlace(12, 4),
        "cas": FieldPlace(16, 8),
        "seqno": FieldPlace(24, 8),
        "rev_seqno": FieldPlace(32, 8),
        "flags": FieldPlace(40, 4),
        "expiry": FieldPlace(44, 4),
        "lock_time": FieldPlace(48, 4),
    }
    assert mutation.trailer == FieldPlace(52, 2)
    assert mutation.private is None


def test_the_engine_private_part_of_tap_holds_the_revision() -> None:
    places = {row.fixed_length: row.places.get("rev_seqno") for row in row_layouts(tap.tap) if row.opcode == 0x41}
    assert places == {16: None, 24: FieldPlace(40, 8), 25: FieldPlace(40, 8)}


@pytest.mark.parametrize("name", ["upr_draft1", "upr_draft2", "memcached"])
def test_dialects_without_changes_on_the_24_byte_header_have_no_layouts(name: str) -> None:
    assert row_layouts(DIALECTS[name]) == ()


def test_fields_find_their_columns() -> None:
    assert field_column("by_seqno") == "seqno"
    assert field_column("expiration") == field_column("delete_time") == "expiry"
    assert field_column("ttl") == "ttl"
    assert field_column("nmeta") is None


@pytest.mark.parametrize("name", ["dcp", "upr", "tap", "upr_draft3"])
def test_places_are_as_wide_as_their_columns(name: str) -> None:
    widths = {field.name: field.type for field in [*CHANGES, *TRANSPORT]}
    for row in row_layouts(DIALECTS[name]):
        assert {column: widths[column].bit_width // 8 for column in row.places} == {
            column: place.size for column, place in row.places.items()
        }


def test_a_template_is_the_message_up_to_its_key() -> None:
    templates = row_templates(dcp.dcp, vbucket=7, expirations=True, delete_times=False, given={})
    example: dict[str, Any] = {"vbucket": 7, "by_seqno": 0, "rev_seqno": 0, "key": b"k"}
    assert templates[Event.MUTATION].head + b"k" == dcp.Mutation(**example).encode()
    assert templates[Event.DELETION].head + b"k" == dcp.Deletion(**example).encode()
    assert len(templates[Event.EXPIRATION].head) == 24 + 20


def test_a_template_of_a_short_draft_begins_with_its_header_and_the_type() -> None:
    templates = row_templates(upr_draft2.upr_draft2, vbucket=7, expirations=True, delete_times=False, given={})
    mutation, deletion = templates[Event.MUTATION], templates[Event.DELETION]
    assert mutation.head + b"k" == upr_draft2.Mutation(by_seqno=0, rev_seqno=0, key=b"k").encode()
    assert mutation.layout.places["opaque"] == FieldPlace(4, 4)
    assert mutation.layout.places["cas"] == FieldPlace(13, 8)
    assert (mutation.tells_key_length, deletion.tells_key_length) == (True, False)
    assert mutation.key_bytes_min == 1


def test_both_headers_have_the_lengths_at_the_same_offsets() -> None:
    assert DRAFT.at("key length") == MEMCACHED.at("key length")
    assert DRAFT.length_offset == MEMCACHED.length_offset


def test_a_dialect_without_expirations_sends_deletions() -> None:
    templates = row_templates(tap.tap, vbucket=7, expirations=True, delete_times=False, given={"ttl": 3})
    assert templates[Event.EXPIRATION] is templates[Event.DELETION]
    decoded = tap.tap.decode(templates[Event.MUTATION].head + b"k")
    assert isinstance(decoded, tap.Mutation)
    assert decoded.ttl == 3
