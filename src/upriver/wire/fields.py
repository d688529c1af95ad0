"""The kinds of field that suffice to declare every message of every dialect.

A message class lists its fields in the order of their bytes. Each annotation says two things: the Python type
that callers see, and the kind that says how it is encoded. Leading numbers form the *fixed part* (the
extras of a memcached packet); from the first other field on, lengths vary.
"""

import dataclasses
from typing import Annotated, Any, Final, Literal


@dataclasses.dataclass(frozen=True, slots=True)
class UInt:
    """A big-endian unsigned number of ``size`` bytes."""

    size: int


@dataclasses.dataclass(frozen=True, slots=True)
class Reserved:
    """Bytes that are sent as zeros and ignored when received. Declared as a class variable."""

    size: int


class KeyBytes:
    """The key. Its length is in the header; where the framing has no key length, the key is the rest of the body."""


class RestBytes:
    """The value: all bytes that belong to no other field."""


class CountedBytes:
    """Bytes whose number is in the field that is declared as ``count_of`` this one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Repeat:
    """Consecutive records: up to the end, or as many as a leading number says."""

    #: A record class, or a ``UInt`` for plain numbers.
    element: Any
    #: The enumeration that repeated numbers belong to.
    code: type[int] | None = None
    #: Size of the leading number; 0 if the records fill the rest of the body.
    count_size: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Only:
    """The field is present only in fixed parts of these lengths; elsewhere it has its default."""

    lengths: tuple[int, ...]

    def __init__(self, *lengths: int) -> None:
        object.__setattr__(self, "lengths", lengths)


@dataclasses.dataclass(frozen=True, slots=True)
class When:
    """The field is present only if these bits are set in an earlier field."""

    field: str
    mask: int
    #: The sender may omit it even then: the body ends before its number.
    optional: bool = False


class InValue:
    """A number that belongs to the value, although no key precedes it."""


IN_VALUE: Final = InValue()

U8 = Annotated[int, UInt(1)]
U16 = Annotated[int, UInt(2)]
U32 = Annotated[int, UInt(4)]
U64 = Annotated[int, UInt(8)]
Key = Annotated[bytes, KeyBytes()]
Value = Annotated[bytes, RestBytes()]
Counted = Annotated[bytes, CountedBytes()]


@dataclasses.dataclass(frozen=True, slots=True)
class CountOf:
    """The default of a length field: the sizes of the named fields, added up."""

    names: tuple[str, ...]


def count_of(*names: str, init: Literal[False] = False) -> Any:  # noqa: ARG001
    """Declare a length that is always computed, never passed: ``nmeta: U16 = count_of("meta")``.

    ``init`` only tells type checkers that the constructor has no such argument.
    """
    return CountOf(names)
