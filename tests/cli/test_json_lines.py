"""Documents as JSON lines: whatever goes out comes in again."""

import json

import hypothesis.strategies as st
import pytest
from hypothesis import given

from upriver.cli.json_lines import NotADocument, batches_of, event_line, lines_of, text_fields
from upriver.client.consumer.batches import Rollback
from upriver.model import Change, Event, change_batch

u32 = st.integers(0, 2**32 - 1)
changes = st.builds(
    Change,
    vbucket=st.integers(0, 1023),
    event=st.sampled_from([Event.MUTATION, Event.DELETION]),
    seqno=st.integers(1, 2**63),
    rev_seqno=st.integers(0, 2**64 - 1),
    cas=st.integers(0, 2**64 - 1),
    flags=u32,
    expiry=u32,
    datatype=st.integers(0, 255),
    key=st.binary(min_size=1, max_size=20),
    value=st.one_of(st.binary(max_size=50), st.text(max_size=20).map(lambda text: text.encode(errors="replace"))),
)


@given(st.lists(changes, min_size=1, max_size=10), st.integers(1, 4))
def test_what_goes_out_comes_in(written: list[Change], rows_max: int) -> None:
    lines = [line.encode() for line in lines_of(change_batch(written))]
    assert all(b"\n" not in line for line in lines)
    rows = [row for batch in batches_of(lines, rows_max) for row in batch.to_pylist()]
    assert len(rows) == len(written)
    for row, change in zip(rows, written, strict=True):
        stored = change.event is Event.MUTATION
        expected = {
            name: getattr(change, name) for name in ("key", "event", "flags", "expiry", "cas", "rev_seqno", "datatype")
        }
        expected["value"] = change.value if stored else b""
        assert {name: row[name] for name in expected} == expected


def test_the_fields_of_a_line() -> None:
    change = Change(
        vbucket=3, event=Event.MUTATION, seqno=9, rev_seqno=4, cas=5, flags=1, expiry=2, key=b"k", value=b'{"a":1}'
    )
    (line,) = lines_of(change_batch([change]))
    assert line == '{"key":"k","value":"{\\"a\\":1}","flags":1,"expiry":2,"cas":5,"seqno":9,"vbucket":3,"rev_seqno":4}'
    (line,) = lines_of(change_batch([change]), with_event=True)
    assert json.loads(line)["event"] == "mutation"


def test_values_may_be_any_json() -> None:
    lines = [b'{"key":"a","value":{"x":[1,"\xc3\xa4"]}}', b"", b'{"key":"b","value":7}', b'{"key":"c","value":""}']
    (batch,) = batches_of(lines, 10)
    assert batch.column("value").to_pylist() == ['{"x":[1,"ä"]}'.encode(), b"7", b""]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"nonsense", "line 2"),
        (b"[1]", "not a JSON object"),
        (b"{}", "the key is missing"),
        (b'{"key":1,"value":""}', "the key must be a text"),
        (b'{"key":"a"}', "the value is missing"),
        (b'{"key_base64":"?","value":""}', "key_base64 is not base64"),
        (b'{"key_base64":7,"value":""}', "key_base64 is not base64"),
        (b'{"key":"\\ud800","value":""}', "unpaired surrogate"),
        (b'{"key":"a","value":"","flags":-1}', "flags must be a number"),
        (b'{"key":"a","value":"","flags":true}', "flags must be a number"),
        (b'{"key":"a","value":"","expiry":4294967296}', "expiry must be a number"),
        (b"[" * 100_000, "line 2"),
        (b"\xff", "line 2"),
    ],
)
def test_what_is_no_document(line: bytes, why: str) -> None:
    with pytest.raises(NotADocument, match="line 2: ") as caught:
        list(batches_of([b'{"key":"a","value":"b"}', line], 10))
    assert why in str(caught.value)


def test_events_and_texts() -> None:
    told = json.loads(event_line(Rollback(3, 7, 1, 2)))
    assert told == {"vbucket": 3, "seqno": 7, "old_uuid": 1, "new_uuid": 2, "event": "rollback"}
    assert text_fields("key", b"\xff") == {"key_base64": "/w=="}
