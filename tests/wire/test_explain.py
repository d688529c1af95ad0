"""Explanations: the texts' own field lists, the guess of the dialect, and the pictures."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.errors import WireError
from upriver.wire import DIALECTS, Dialect, dcp, memcached, read_hexdump, tap, upr, upr_draft1, upr_draft2, upr_draft3
from upriver.wire.explain import (
    Explanation,
    Ink,
    Misfit,
    diagram,
    explain,
    explain_packet,
    explanation_json,
    explanation_text,
    field_list,
    heading,
    json_value,
    misfit,
    readable,
    value_bytes,
)
from upriver.wire.layout import Span
from upriver.wire.message import AnyRequest, AnyResponse

DATA = Path(__file__).parent.parent / "data"

# The texts


def _vectors() -> list[Any]:
    found = []
    for path in sorted((DATA / "vectors").glob("*.json")):
        file = json.loads(path.read_text())
        usable = (v for v in file["vectors"] if v["kind"] == "message" and v["wire"] is not None)
        found += [pytest.param(file["dialect"], vector, id=vector["id"]) for vector in usable]
    return found


#: What the texts call our fields, where the words differ; some use one word for several things.
ALIASES = {
    "# listed": {"vbuckets listed"},
    "end by seqno": {"end seqno"},
    "engine priv.": {"private length"},
    "flag": {"reason"},
    "flags": {"flags", "tap flags", "reason"},
    "high seqno": {"high seqno", "seqno"},
    "item exp": {"expiration"},
    "item expiry": {"expiration"},
    "item flags": {"flags"},
    "key": {"key", "name"},
    "opaque": {"opaque", "stream opaque"},
    "request type": {"type", "data type"},
    "rollback #": {"seqno"},
    "rollback seqno": {"seqno"},
    "start by seqno": {"start seqno"},
    "status": {"status", "vbucket"},
    "vb seqno": {"seqno"},
    "vb state": {"state"},
    "vb uuid": {"vbucket uuid"},
}

#: Meanings in parentheses that are not words of ours: decimal numbers, some of them wrong, and one constant's name.
NO_MEANING = re.compile(r"-?\d+|2\^64|PROTOCOL_BINARY_REQ")

#: The texts' words for meanings that we have other words for.
MEANINGS = {
    "ok": {"ok", "success"},
    "rollback": {"rollback", "rollback required"},
    "stream": {"stream request"},
    "failover log": {"failover log request"},
    "failover log request": {"failover log request"},
    "vbucket set": {"set vbucket"},
    "set vbucket": {"set vbucket state"},
    "snaphot end": {"snapshot end"},
}


@pytest.mark.parametrize(("dialect", "vector"), _vectors())
def test_the_fields_are_those_that_the_texts_print(dialect: str, vector: dict[str, Any]) -> None:
    explanation = explain_packet(bytes.fromhex(vector["wire"]), DIALECTS[dialect])
    lines = [field for field in vector["fields"] if field["printed"] and field["name"] not in vector["wrong_fields"]]
    assert len(lines) > 3
    for line in lines:
        _check_line(line, explanation)


def _check_line(line: dict[str, str], explanation: Explanation) -> None:
    name, first, last = line["name"].lower(), int(line["first"]), int(line["last"])
    value, meaning = _printed(line["printed"])
    if isinstance(value, bytes):  # one text prints a last offset that is too small for its own bytes
        last = first + len(value) - 1
    if name == "reserved":  # TAP prints each byte by itself
        (span,) = (s for s in explanation.fields if s.first <= first and last <= s.last)
        assert explanation.packet[first : last + 1] == bytes(last + 1 - first)
    else:
        (span,) = (s for s in explanation.fields if (s.first, s.last) == (first, last))
    assert span.name in ALIASES.get(name, {name})
    assert span.value == value, line
    if meaning and not NO_MEANING.fullmatch(meaning):
        said = re.sub(r"^(tap|upr) ", "", meaning.lower().replace("_", " "))
        assert span.meaning in MEANINGS.get(said, {said}), line


def _printed(text: str) -> tuple[int | bytes, str]:
    """The value of a printed line, and the text in parentheses after it."""
    number = re.fullmatch(r"(?:0x)?([0-9a-fA-F]+)\s*(?:\((.*)\))?\s*", text)
    if number and (text.startswith("0x") or len(text) == 2):
        return int(number[1], 16), number[2] or ""
    return text.removeprefix("[").removesuffix("]").strip('"').encode() if text[0] in '["' else text.encode(), ""


@pytest.mark.parametrize(("dialect", "vector"), _vectors())
def test_every_byte_belongs_to_one_field(dialect: str, vector: dict[str, Any]) -> None:
    explanation = explain_packet(bytes.fromhex(vector["wire"]), DIALECTS[dialect])
    covered = [at for span in explanation.fields for at in range(span.first, span.last + 1)]
    assert covered == list(range(explanation.length))


# Guessing


@pytest.mark.parametrize(("dialect", "vector"), _vectors())
def test_a_guess_says_the_same_as_the_right_dialect_or_could_not_know(dialect: str, vector: dict[str, Any]) -> None:
    packet = bytes.fromhex(vector["wire"])
    (guessed,) = explain(packet)
    wanted = explain_packet(packet, DIALECTS[dialect])
    fits_alike = misfit(DIALECTS[guessed.dialect], packet) == misfit(DIALECTS[dialect], packet)
    assert guessed.dialect == dialect or fits_alike
    assert [(s.first, s.last, s.value) for s in guessed.fields] == [(s.first, s.last, s.value) for s in wanted.fields]


RUNS = {
    "memcached": (memcached.Get(key=b"k"), memcached.GetResponse(value=b"v")),
    "tap": (memcached.Noop(), tap.Connect(name=b"node1"), tap.Mutation(key=b"k")),
    "upr_draft2": (upr_draft1.StreamRequest(vbucket=1), upr_draft1.Ok(), upr_draft2.Flush()),
    "upr_draft3": (upr_draft3.StreamRequest(), upr_draft3.StreamStart(), upr_draft3.SnapshotStart()),
    "upr": (
        memcached.Hello(),
        upr.Open(name=b"n"),
        AnyResponse(opcode=0x50),
        upr.StreamRequest(),
        upr.SnapshotMarker(),
        upr.Mutation(by_seqno=1, key=b"k"),
    ),
    "dcp": (
        memcached.SaslAuth(mechanism=b"PLAIN"),
        dcp.Open(name=b"n"),
        dcp.StreamRequest(),
        dcp.SnapshotMarker(start_seqno=0, end_seqno=1),
        dcp.Mutation(by_seqno=1, key=b"k"),
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_packets_is_of_one_dialect(name: str) -> None:
    found = list(explain(b"".join(message.encode() for message in RUNS[name])))
    assert [explanation.dialect for explanation in found] == [name] * len(RUNS[name])


@pytest.mark.parametrize(
    ("message", "dialect", "title"),
    [
        (upr.RollbackRequired(seqno=7), "upr", "rollback required"),
        (dcp.RollbackRequired(seqno=7), "dcp", "rollback required"),
        (upr_draft3.RollbackRequired(seqno=7), "upr_draft3", "rollback required"),
        (upr_draft3.FailoverLogResponse(), "upr_draft3", "failover log response"),
        (upr.AddStreamResponse(stream_opaque=1), "dcp", "add stream response"),
        (AnyResponse(opcode=0x5C), "dcp", "noop response"),
        (AnyResponse(opcode=0x41), "tap", "mutation response"),
        (AnyResponse(opcode=0x0A), "memcached", "noop response"),
        (AnyResponse(opcode=0xF0), "memcached", "unknown response"),
        (AnyRequest(opcode=0xF0), "memcached", "unknown request"),
    ],
)
def test_a_lone_packet_can_be_guessed(message: Any, dialect: str, title: str) -> None:
    (found,) = explain(message.encode())
    assert (found.dialect, found.message) == (dialect, title)


@pytest.mark.parametrize("path", sorted((DATA / "transcripts").glob("*.txt")), ids=lambda path: path.stem)
def test_recordings_are_recognised(path: Path) -> None:
    found: list[Explanation] = []
    try:
        found.extend(explain(read_hexdump(path.read_bytes())))
    except WireError:
        assert path.stem in {"dcp_01_open", "dcp_06_errors"}  # these hold malformed packets on purpose
    wanted = {"tap": {"tap"}, "upr2014": {"upr", "dcp"}}.get(path.name.partition("_")[0], {"dcp"})
    assert {explanation.dialect for explanation in found} <= wanted
    assert len(found) > 10 or path.stem == "dcp_01_open"


def test_misfits() -> None:
    assert misfit(dcp.dcp, dcp.Noop().encode()) is None
    assert misfit(upr.upr, dcp.Noop().encode()) is Misfit.UNKNOWN
    assert misfit(upr.upr, dcp.StreamRequest().encode()) is Misfit.REFUSED
    assert misfit(dcp.dcp, AnyResponse(opcode=0x5C).encode()) is Misfit.UNDECLARED
    assert misfit(dcp.dcp, upr.StreamRequest().encode()) is Misfit.OLD_LAYOUT
    assert misfit(dcp.dcp, upr.RollbackRequired(seqno=1).encode()) is Misfit.ALTERED


# Wrong bytes


def _good_then(wrong: bytes) -> tuple[list[Explanation], WireError]:
    found: list[Explanation] = []
    with pytest.raises(WireError) as failure:
        found.extend(explain(dcp.Noop().encode() + wrong))
    return found, failure.value


@pytest.mark.parametrize(
    ("wrong", "offset", "expected"),
    [
        (b"\x80", 24, "a 24-byte memcached header"),
        (dcp.StreamRequest().encode()[:-1], 24, "a packet of 72 bytes"),
        (b"\x42" * 24, 24, "magic 0x80 or 0x81"),
        (dcp.SnapshotMarker(start_seqno=0, end_seqno=1).encode().replace(b"\x14", b"\x13", 1), 28, "bytes of extras"),
    ],
)
def test_good_packets_come_before_the_error(wrong: bytes, offset: int, expected: str) -> None:
    found, error = _good_then(wrong)
    assert [explanation.message for explanation in found] == ["noop"]
    assert error.offset == offset
    assert expected in error.expected


@given(st.binary(max_size=80), st.sampled_from([None, *DIALECTS.values()]))
def test_whatever_the_bytes_nothing_but_a_wire_error_is_raised(data: bytes, dialect: Dialect | None) -> None:
    with contextlib.suppress(WireError):
        for found in explain(data, dialect):
            assert explanation_text(found)
            assert json.dumps(explanation_json(found))


@given(st.sampled_from(_vectors()), st.integers(0, 60), st.integers(0, 255))
def test_a_damaged_packet_is_explained_or_refused(vector: Any, at: int, byte: int) -> None:
    packet = bytearray.fromhex(vector.values[1]["wire"])
    packet[at % len(packet)] = byte
    with contextlib.suppress(WireError):
        for found in explain(bytes(packet)):
            assert [s.first for s in found.fields] == [0, *(s.last + 1 for s in found.fields[:-1])]


@pytest.mark.parametrize("data", [b"", b"\x00", b"GET / HTTP/1.1"])
def test_what_is_no_packet_is_refused(data: bytes) -> None:
    with pytest.raises(WireError, match="at byte 0: expected magic 0x80 or 0x81, or a draft's opcode 0x01 to 0x07"):
        list(explain(data))


def test_a_dialect_that_is_told_is_not_guessed() -> None:
    (found,) = explain(dcp.Mutation(by_seqno=1, key=b"k").encode(), upr.upr)
    assert found.dialect == "upr"
    with pytest.raises(WireError):
        list(explain(dcp.Noop().encode(), upr_draft2.upr_draft2))


# Pictures


MUTATION = dcp.Mutation(by_seqno=5, flags=3, key=b"hi", value=b"\xff\x00", vbucket=12, opaque=0xDEADBEEF)


def test_the_picture_of_a_packet() -> None:
    (found,) = explain(dcp.BufferAck(bytes_processed=60).encode() + b"")
    assert (
        explanation_text(found)
        == """\
dcp buffer ack, 28 bytes at offset 0
  Byte/     0       |       1       |       2       |       3       |
     /              |               |               |               |
    |0 1 2 3 4 5 6 7|0 1 2 3 4 5 6 7|0 1 2 3 4 5 6 7|0 1 2 3 4 5 6 7|
    +---------------+---------------+---------------+---------------+
   0| 0x80          | 0x5d          | 0x00          | 0x00          |
    +---------------+---------------+---------------+---------------+
   4| 0x04          | 0x00          | 0x00          | 0x00          |
    +---------------+---------------+---------------+---------------+
   8| 0x00          | 0x00          | 0x00          | 0x04          |
    +---------------+---------------+---------------+---------------+
  12| 0x00          | 0x00          | 0x00          | 0x00          |
    +---------------+---------------+---------------+---------------+
  16| 0x00          | 0x00          | 0x00          | 0x00          |
    +---------------+---------------+---------------+---------------+
  20| 0x00          | 0x00          | 0x00          | 0x00          |
    +---------------+---------------+---------------+---------------+
  24| 0x00          | 0x00          | 0x00          | 0x3c          |
    +---------------+---------------+---------------+---------------+
    Field             (offset) (value)
    Magic             (0)    : 0x80 (request)
    Opcode            (1)    : 0x5d (buffer ack)
    Key length        (2-3)  : 0x0000
    Extra length      (4)    : 0x04
    Data type         (5)    : 0x00
    Vbucket           (6-7)  : 0x0000
    Total body        (8-11) : 0x00000004
    Opaque            (12-15): 0x00000000
    CAS               (16-23): 0x0000000000000000
      bytes processed (24-27): 0x0000003c (60)"""
    )


def test_only_bytes_of_keys_and_values_show_their_character() -> None:
    (found,) = explain(MUTATION.encode())
    rows = diagram(found).splitlines()
    assert rows[-4] == "  52| 0x00          | 0x00          | 0x00          | 0x68 ('h')    |"
    assert rows[-2:] == [
        "  56| 0x69 ('i')    | 0xff          | 0x00          |",
        "    +---------------+---------------+---------------+",
    ]
    assert "0x57 ('W')" not in diagram(found)


def test_the_text_example_is_drawn_as_the_text_draws_it() -> None:
    """Text 000 draws its open like this, with two more spaces in the margin."""
    (found,) = explain(upr.Open(name=b"bucketstream vb[100-105]", opaque=1).encode())
    assert "  44| 0x20 (' ')    | 0x76 ('v')    | 0x62 ('b')    | 0x5b ('[')    |" in diagram(found).splitlines()
    assert "      flags      (28-31): 0x00000000 (consumer)" in field_list(found).splitlines()


def test_a_long_packet_is_abridged_in_the_picture_alone() -> None:
    (found,) = explain(memcached.Set(key=b"k", value=b"a" * 1223).encode())
    assert found.length == 1256
    assert diagram(found).endswith("+\n     … 1,000 bytes more")
    assert field_list(found).endswith(f'"{"a" * 64}" … 1,159 bytes more')
    assert '"' + "a" * 1223 + '"' in json.dumps(explanation_json(found))


def test_bytes_that_are_no_text_are_shown_as_numbers() -> None:
    (found,) = explain(MUTATION.encode())
    assert field_list(found).splitlines()[-1].endswith(": 0xff00")
    (long,) = explain(memcached.Set(key=b"k", value=b"\xff" * 40).encode())
    assert field_list(long).endswith(f": 0x{'ff' * 32} … 8 bytes more")


def test_line_breaks_do_not_break_the_list() -> None:
    (found,) = explain(memcached.Set(key=b"k", value=b"a\n\tb").encode())
    assert field_list(found).endswith('"a\\n\\tb"')


def test_an_unknown_code_says_so_once() -> None:
    (found,) = explain(dcp.SetVbucketState(state=upr.VbucketState(9)).encode())
    assert field_list(found).endswith(": 0x09 (unknown)")
    assert found.fields[-1].meaning == "unknown(0x09)"


def test_numbers_of_a_handy_size_are_glossed() -> None:
    listed = field_list(explain_packet(dcp.StreamRequest(vbucket=12, opaque=0xDEADBEEF).encode(), dcp.dcp))
    assert "0x000c (12)" in listed
    assert "0xffffffffffffffff (2^64-1)" in listed
    assert "0xdeadbeef\n" in listed


def test_every_piece_is_painted() -> None:
    used: set[Ink] = set()

    def paint(text: str, ink: Ink) -> str:
        used.add(ink)
        return f"<{text}>"

    (found,) = explain(MUTATION.encode())
    assert heading(found, paint) == "<dcp mutation>, 59 bytes at offset 0"
    painted = explanation_text(found, paint)
    assert used == set(Ink)
    assert re.sub("[<>]", "", painted) == explanation_text(found)


def test_offsets_count_from_the_beginning_of_the_input() -> None:
    first, second = explain(dcp.Noop().encode() + MUTATION.encode())
    assert (first.offset, second.offset, second.fields[0].first) == (0, 24, 0)


# JSON


def test_json_of_a_request() -> None:
    (found,) = explain(MUTATION.encode())
    shown = explanation_json(found)
    assert list(shown) == ["dialect", "message", "magic", "offset", "length", "fields"]
    assert (shown["dialect"], shown["message"], shown["magic"], shown["length"]) == ("dcp", "mutation", 0x80, 59)
    fields = json.loads(json.dumps(shown["fields"]))
    assert fields[0] == {"name": "magic", "first": 0, "last": 0, "value": 128, "meaning": "request"}
    assert fields[-2] == {"name": "key", "first": 55, "last": 56, "value": "hi", "meaning": ""}
    assert fields[-1] == {"name": "value", "first": 57, "last": 58, "value": "hex:ff00", "meaning": ""}


def test_the_drafts_have_no_magic() -> None:
    (found,) = explain(upr_draft1.StreamStart().encode())
    assert explanation_json(found)["magic"] is None
    assert found.fields[1] == Span("reserved", 1, 3, 0, "")
    (mutation,) = explain(upr_draft1.Mutation(by_seqno=1, key=b"key").encode())
    assert mutation.fields[1:3] == (Span("reserved", 1, 1, 0, ""), Span("key length", 2, 3, 3, ""))


@pytest.mark.parametrize("value", [b"", b"text", "žluťoučký".encode(), b"\xff\xfe", b"hex:", b"hex:00", b"\x00\n"])
def test_json_values_can_be_turned_back(value: bytes) -> None:
    text = json_value(value)
    assert value_bytes(json.loads(json.dumps(text))) == value
    assert text.startswith("hex:") == (value in {b"\xff\xfe", b"hex:", b"hex:00"})


def test_what_is_readable() -> None:
    assert readable("ž\n".encode()) == "ž\n"
    assert readable(b"\x00") is None
    assert readable(b"\xff") is None
