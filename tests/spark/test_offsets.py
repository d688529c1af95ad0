"""Offsets: the same text for the same places, and nothing lost in between."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.errors import OffsetError
from upriver.spark import describe_offset
from upriver.spark.offsets import Offset, VbucketOffset, first_end, logged_start, read_offset, starting

SEQNOS = st.integers(0, 2**64 - 1)


@st.composite
def places(draw: st.DrawFn, vbucket: int) -> VbucketOffset:
    seqno = draw(SEQNOS)
    uuid = draw(st.integers(1, 2**48 - 1))
    flags = draw(st.tuples(st.integers(0, 1), st.integers(0, 1)))
    consistent, branch = draw(st.integers(0, seqno)), draw(st.integers(0, 99))
    return VbucketOffset(vbucket, uuid, seqno, consistent, branch, draw(SEQNOS), *flags)


@st.composite
def offsets(draw: st.DrawFn) -> Offset:
    vbuckets = draw(st.sets(st.integers(0, 1023), max_size=8))
    return Offset([draw(places(vbucket)) for vbucket in vbuckets])


@given(offsets())
def test_packed_and_unpacked_is_the_same(offset: Offset) -> None:
    text = json.dumps(offset.packed())
    assert Offset.unpacked(json.loads(text)) == offset
    assert json.dumps(Offset.unpacked(json.loads(text)).packed()) == text


@given(offsets())
def test_the_form_for_people_says_the_same(offset: Offset) -> None:
    described = describe_offset(json.dumps(offset.packed()))
    read = read_offset(json.dumps(described))
    assert isinstance(read, dict)
    assert read == offset.vbuckets


def test_the_order_in_which_places_are_given_does_not_matter() -> None:
    one, other = VbucketOffset(1, 7, 3, 3), VbucketOffset(2, 8, 4, 1)
    assert Offset([one, other]).packed() == Offset([other, one]).packed()


def test_1024_vbuckets_stay_small() -> None:
    offset = Offset(VbucketOffset(n, 2**47 + n, 10_000_000 + n, 10_000_000 + n, 1, 5) for n in range(1024))
    assert len(json.dumps(offset.packed())) < 26_000


def test_a_later_version_is_refused() -> None:
    packed = Offset([VbucketOffset(1, 7, 3, 3)]).packed() | {"version": 3}
    with pytest.raises(OffsetError, match=r"version 3.*new checkpoint"):
        Offset.unpacked(packed)


def test_the_first_version_is_read() -> None:
    packed = {"version": 1, "count": 2, "places": "AQECAQcIAQMEAQADAAEDAQ=="}
    assert Offset.unpacked(packed) == Offset([VbucketOffset(1, 7, 3, 3, 0, 3), VbucketOffset(2, 8, 4, 1, 0, 1)])


def test_the_first_end_remembers_its_start() -> None:
    nothing, other = Offset([VbucketOffset(1)]).packed(), Offset([VbucketOffset(1, 7, 9, 9)]).packed()
    begun = starting(nothing)
    ends = [Offset([VbucketOffset(1, 7, seqno)]).packed() for seqno in (3, 4)]
    first = first_end(begun, ends[0])
    assert logged_start(starting(other), first) == nothing
    assert logged_start(starting(other), begun) == nothing  # the first batch was empty
    second = first_end(first, ends[1])
    assert second == ends[1]
    assert logged_start(first, second) == first
    assert Offset.unpacked(logged_start(nothing, ends[0])) == Offset([VbucketOffset(1)])  # by an earlier release


@pytest.mark.parametrize("text", ["!", "", "AAAA", "CQ=="])
def test_a_damaged_offset_is_refused(text: str) -> None:
    with pytest.raises(OffsetError, match="damaged"):
        Offset.unpacked({"version": 1, "count": 3, "places": text})


def test_per_vbucket_words_are_taken() -> None:
    assert read_offset('{"3": "earliest", "4": "latest", "5": {"uuid": "0x10", "seqno": 9}}') == {
        3: "earliest",
        4: "latest",
        5: VbucketOffset(5, 16, 9, 9, 0, 9),
    }


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("soon", "must be earliest, latest or JSON"),
        ("[1]", "a JSON object"),
        ('{"x": "latest"}', "invalid vbucket"),
        ('{"70000": "latest"}', "invalid vbucket"),
        ('{"1": "soon"}', 'write "earliest", "latest"'),
        ('{"1": {"seqno": 4}}', "uuid and seqno must be given"),
        ('{"1": {"uuid": 3, "seqno": -1}}', "not an unsigned 64-bit number"),
        ('{"1": {"uuid": 3, "seqno": true}}', "not an unsigned 64-bit number"),
        ('{"1": {"uuid": 3, "seqno": 2, "whole": 3}}', "whole is 3, but must not exceed the seqno 2"),
        ('{"1": {"uuid": 0, "seqno": 2}}', "needs the uuid of its branch"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(text: str, complaint: str) -> None:
    with pytest.raises(OffsetError, match=complaint):
        read_offset(text)
