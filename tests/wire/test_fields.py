"""The kinds of field: what they say to type checkers and to layouts."""

import typing

from upriver.wire import fields


def test_numbers_have_their_size_in_bytes() -> None:
    kinds = {"U8": 1, "U16": 2, "U32": 4, "U64": 8}
    for name, size in kinds.items():
        assert typing.get_args(getattr(fields, name)) == (int, fields.UInt(size))


def test_bytes_have_their_kind() -> None:
    kinds = {"Key": fields.KeyBytes, "Value": fields.RestBytes, "Counted": fields.CountedBytes}
    for name, kind in kinds.items():
        python_type, note = typing.get_args(getattr(fields, name))
        assert python_type is bytes
        assert type(note) is kind


def test_only_takes_any_number_of_lengths() -> None:
    assert fields.Only(18).lengths == (18,)
    assert fields.Only(24, 25) == fields.Only(24, 25)
    assert fields.Only(24, 25).lengths == (24, 25)


def test_a_count_names_what_it_counts() -> None:
    assert fields.count_of("rev_seqno", "nru") == fields.CountOf(("rev_seqno", "nru"))
