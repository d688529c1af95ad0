"""The byte layout of a declared class, built once from its annotations and used by encoders, decoders and explain.

A layout has a *fixed part*, one ``struct`` per allowed length, and the fields after it, processed one by one. A
declaration whose sizes do not add up is refused when its module is imported.
"""

import dataclasses
import enum
import inspect
import struct
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar, dataclass_transform

from upriver.errors import WireError
from upriver.wire.codes import meaning_of
from upriver.wire.fields import (
    CountedBytes,
    CountOf,
    InValue,
    KeyBytes,
    Only,
    Repeat,
    Reserved,
    RestBytes,
    UInt,
    When,
    count_of,
)

Buffer = bytes | bytearray | memoryview
_MISSING: Final = object()
_STRUCT_CODES: Final = {1: "B", 2: "H", 4: "I", 8: "Q"}
_NUMBERS: Final = {size: struct.Struct(">" + code) for size, code in _STRUCT_CODES.items()}


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a declaration."""

    name: str
    kind: UInt | Reserved | KeyBytes | RestBytes | CountedBytes | Repeat
    #: Turns the number into its code or flags; None for plain numbers.
    code: type[int] | None = None
    default: Any = _MISSING
    only: tuple[int, ...] = ()
    when: When | None = None
    counts: tuple[str, ...] = ()
    in_value: bool = False

    @property
    def fixed(self) -> bool:
        return isinstance(self.kind, UInt | Reserved) and self.when is None and not self.in_value

    @property
    def required(self) -> bool:
        return self.default is _MISSING and not self.counts

    @property
    def is_key(self) -> bool:
        return isinstance(self.kind, KeyBytes)


@dataclass(frozen=True, slots=True)
class Span:
    """A decoded field: inclusive byte offsets inside its packet, the value and its meaning."""

    name: str
    first: int
    last: int
    value: Any
    meaning: str = ""


@dataclass(frozen=True, slots=True)
class FixedPart:
    """The fixed part at one of its lengths."""

    struct: struct.Struct
    fields: tuple[Field, ...]
    #: Fields with a number, in the order in which the struct reads them.
    named: tuple[Field, ...]
    #: Fields that are present only at another length.
    absent: tuple[Field, ...]

    def offsets(self) -> Iterator[tuple[Field, int, int]]:
        """Each field with its offset and size, reserved bytes included."""
        at = 0
        for field in self.fields:
            size = typing.cast(UInt | Reserved, field.kind).size
            yield field, at, size
            at += size


class Layout:
    """The fields of one class, in the order of their bytes."""

    def __init__(self, cls: type, lengths: Sequence[int] = (), private: str | None = None) -> None:
        self.owner = cls.__name__
        self.fields = tuple(_declared_fields(cls))
        leading = 0
        while leading < len(self.fields) and self.fields[leading].fixed:
            leading += 1
        self.fixed_fields, self.rest = self.fields[:leading], self.fields[leading:]
        self.private = private
        self.counted = {name: field.name for field in self.fields for name in field.counts}
        self.counters = tuple(field.name for field in self.fields if field.counts)
        self.lengths = tuple(lengths) or (sum(_size(field) for field in self.fixed_fields),)
        #: The lengths of the fixed part without the engine-private bytes that follow TAP's extras.
        self.extras_lengths = self.lengths
        if private is not None:
            self.extras_lengths = (sum(_size(field) for field in self.fixed_fields if field.name not in self.counted),)
        self.parts = {length: self._part(length) for length in self.lengths}
        self._check_references()
        self.has_key = any(field.is_key for field in self.rest)
        self.has_value = any(not field.is_key for field in self.rest)
        self._prepare_encoding()

    def _prepare_encoding(self) -> None:
        """Facts that encoding would otherwise compute for each message."""
        self.by_name = {field.name: field for field in self.fields}
        self.header_name = f"the header of {self.owner}"
        #: Index of the key among the fields after the fixed part; None without a key.
        self.key_place = next((place for place, field in enumerate(self.rest) if field.is_key), None)
        self._names = {length: tuple(field.name for field in part.named) for length, part in self.parts.items()}
        #: The length of the fixed part if only one is allowed.
        self._length = self.lengths[0] if len(self.lengths) == 1 else None
        if any(field.default is None for field in self.fixed_fields):
            self._length = None
        #: Name, packer and name in errors of each field after the fixed part, if all are always present and none is a
        #: list; bytes need no packer.
        plain = all(field.when is None and not isinstance(field.kind, Repeat) for field in self.rest)
        self._plain_rest = tuple(map(self._plain_field, self.rest)) if plain else None

    def _plain_field(self, field: Field) -> tuple[str, struct.Struct | None, str]:
        packer = _NUMBERS[field.kind.size] if isinstance(field.kind, UInt) else None
        return field.name, packer, f"{self.owner}.{field.name}"

    def _check_references(self) -> None:
        """Check names of other fields now: a wrong one would otherwise show only when a packet arrives."""
        names = {field.name for field in self.fields}
        for field in self.fields:
            if isinstance(field.kind, CountedBytes) and field.name not in self.counted:
                raise TypeError(f"{self.owner}.{field.name}: no field is declared as count_of it")
            for name in (*field.counts, *([field.when.field] if field.when else [])):
                if name not in names:
                    raise TypeError(f"{self.owner}.{field.name}: unknown field {name}")

    def _part(self, length: int) -> FixedPart:
        present = tuple(f for f in self.fixed_fields if not f.only or length in f.only)
        size = sum(_size(field) for field in present)
        if size != length:
            raise TypeError(f"{self.owner}: a fixed part of {length} bytes is declared, its fields take {size}")
        codes = (_STRUCT_CODES[f.kind.size] if isinstance(f.kind, UInt) else f"{_size(f)}x" for f in present)
        named = tuple(f for f in present if isinstance(f.kind, UInt))
        absent = tuple(f for f in self.fixed_fields if f not in present)
        return FixedPart(struct.Struct(">" + "".join(codes)), present, named, absent)

    # Decoding

    def decode(
        self, data: Buffer, start: int, end: int, length: int, key_length: int | None, out: dict[str, Any]
    ) -> None:
        """Read the body between ``start`` and ``end`` into ``out``; ``length`` is that of the fixed part."""
        part = self.parts[length]
        if start + length > end:
            raise WireError(start, f"{length} bytes of fixed fields", f"{end - start}")
        for field, number in zip(part.named, part.struct.unpack_from(data, start), strict=True):
            out[field.name] = number if field.code is None else field.code(number)
        for field in part.absent:
            out[field.name] = 0 if field.counts else field.default
        at = start + length + self._unknown_bytes(length, out)
        if at > end:
            raise WireError(start, f"{at - start} bytes of extras and engine-private part", f"{end - start}")
        for field in self.rest:
            if field.when is not None and _is_left_out(field, field.when, end - at, out):
                out[field.name] = field.default
                continue
            out[field.name], at = self._decode_field(field, data, at, end, key_length, out)
        if at != end:
            raise WireError(at, f"the end of {self.owner}", f"{end - at} more bytes")
        for name in self.counters:
            del out[name]

    def _unknown_bytes(self, length: int, out: dict[str, Any]) -> int:
        """The size of the rest of an engine-private part, which belongs to no field of ours."""
        if self.private is None:
            return 0
        return self.extras_lengths[0] + int(out[self.private]) - length

    def _decode_field(
        self, field: Field, data: Buffer, at: int, end: int, key_length: int | None, out: dict[str, Any]
    ) -> tuple[Any, int]:
        kind = field.kind
        if isinstance(kind, UInt):
            return _decode_number(field, kind, data, at, end)
        if isinstance(kind, Repeat):
            return _decode_repeat(field, kind, data, at, end)
        size = self._bytes_size(field, at, end, key_length, out)
        if size < 0:
            raise WireError(at, f"{end - at - size} bytes after {field.name}", f"{end - at}")
        if at + size > end:
            raise WireError(at, f"{size} bytes of {field.name}", f"{end - at}")
        return bytes(data[at : at + size]), at + size

    def _bytes_size(self, field: Field, at: int, end: int, key_length: int | None, out: dict[str, Any]) -> int:
        if isinstance(field.kind, KeyBytes) and key_length is not None:
            return key_length
        if isinstance(field.kind, CountedBytes):
            return int(out[self.counted[field.name]])
        behind = self.rest[self.rest.index(field) + 1 :]
        counted = sum(out[self.counted[later.name]] for later in behind if later.name in self.counted)
        return end - at - int(counted)

    # Encoding

    def choose_length(self, values: Any) -> int:
        """The first declared length of the fixed part that has room for all of ``values``."""
        if self._length is not None:
            return self._length
        for length, part in self.parts.items():
            if all(self._is_default(field, values) for field in part.absent) and not any(
                field.default is None and getattr(values, field.name) is None for field in part.named
            ):
                return length
        raise ValueError(f"{self.owner}: no fixed part of {self.lengths} bytes has exactly these fields")

    def _is_default(self, field: Field, values: Any) -> bool:
        if isinstance(field.kind, Reserved):
            return True
        return bool(getattr(values, field.name) == (0 if field.counts else field.default))

    def encode(self, values: Any, length: int) -> tuple[bytes, list[bytes]]:
        """The fixed part, and each field after it."""
        numbers = [getattr(values, name) for name in self._names[length]]
        fixed = packed(self.parts[length].struct, self.owner, *numbers) if length else b""
        if self._plain_rest is not None:
            return fixed, [
                bytes(getattr(values, name)) if packer is None else packed(packer, owner, getattr(values, name))
                for name, packer, owner in self._plain_rest
            ]
        return fixed, [self._encode_field(field, values) for field in self.rest]

    def _encode_field(self, field: Field, values: Any) -> bytes:
        value, kind = getattr(values, field.name), field.kind
        if field.when is not None:
            wanted = bool(getattr(values, field.when.field) & field.when.mask)
            if wanted is (value is None) and not (wanted and field.when.optional):
                raise ValueError(f"{self.owner}: {field.name} and {field.when.field} contradict each other")
            if value is None:
                return b""
        if isinstance(kind, UInt):
            return packed(_NUMBERS[kind.size], f"{self.owner}.{field.name}", value)
        if isinstance(kind, Repeat):
            name = f"{self.owner}.{field.name}"
            count = packed(_NUMBERS[kind.count_size], name, len(value)) if kind.count_size else b""
            return count + b"".join(_encode_element(kind.element, name, element) for element in value)
        return bytes(value)

    def size_of(self, name: str, values: Any) -> int:
        """Size of the named field in bytes; 0 if it is absent."""
        value, kind = getattr(values, name), self.by_name[name].kind
        if value is None:
            return 0
        return kind.size if isinstance(kind, UInt) else len(value)

    # Explaining

    def spans(
        self, data: Buffer, start: int, end: int, length: int, key_length: int | None, origin: int
    ) -> Iterator[Span]:
        """The offsets of each field of a valid body, counted from ``origin``."""
        out: dict[str, Any] = {}
        for field, at, size in self.parts[length].offsets():
            first = start + at
            number = int.from_bytes(data[first : first + size], "big")
            out[field.name] = number if field.code is None else field.code(number)
            yield _span(field.name, first - origin, size, out[field.name])
        for field in self.parts[length].absent:
            out[field.name] = 0 if field.counts else field.default
        at = start + length
        if unknown := self._unknown_bytes(length, out):
            yield _span("engine-private", at - origin, unknown, bytes(data[at : at + unknown]))
            at += unknown
        for field in self.rest:
            if field.when is not None and _is_left_out(field, field.when, end - at, out):
                continue
            out[field.name], after = self._decode_field(field, data, at, end, key_length, out)
            if isinstance(field.kind, Repeat):
                yield from _repeat_spans(field, field.kind, data, at, out[field.name], origin)
            elif after > at:
                yield _span(field.name, at - origin, after - at, out[field.name])
            at = after


def _span(name: str, first: int, size: int, value: Any) -> Span:
    return Span(name.replace("_", " "), first, first + size - 1, value, meaning_of(value))


def _repeat_spans(
    field: Field, kind: Repeat, data: Buffer, at: int, elements: Sequence[Any], origin: int
) -> Iterator[Span]:
    if kind.count_size:
        yield _span(f"{field.name} listed", at - origin, kind.count_size, len(elements))
        at += kind.count_size
    for element in elements:
        if isinstance(kind.element, UInt):
            size = kind.element.size
            yield _span(field.name.removesuffix("s"), at - origin, size, element)
        else:
            size = len(_encode_element(kind.element, field.name, element))
            yield from kind.element.layout.spans(data, at, at + size, kind.element.layout.lengths[0], None, origin)
        at += size


def _size(field: Field) -> int:
    return typing.cast(UInt | Reserved, field.kind).size


def _is_left_out(field: Field, when: When, left: int, out: dict[str, Any]) -> bool:
    """Whether a conditional field is absent, with ``left`` bytes remaining at its offset."""
    if not out[when.field] & when.mask:
        return True
    return when.optional and left < (field.kind.count_size if isinstance(field.kind, Repeat) else _size(field))


def _decode_number(field: Field, kind: UInt, data: Buffer, at: int, end: int) -> tuple[int, int]:
    if at + kind.size > end:
        raise WireError(at, f"{kind.size} bytes of {field.name}", f"{end - at}")
    (number,) = _NUMBERS[kind.size].unpack_from(data, at)
    return (number if field.code is None else field.code(number)), at + kind.size


def _decode_repeat(field: Field, kind: Repeat, data: Buffer, at: int, end: int) -> tuple[tuple[Any, ...], int]:
    elements: list[Any] = []
    if kind.count_size:
        if at + kind.count_size > end:
            raise WireError(at, f"the number of {field.name}", f"{end - at} bytes")
        (count,) = _NUMBERS[kind.count_size].unpack_from(data, at)
        at += kind.count_size
        for _ in range(count):
            element, at = _decode_element(field, kind, data, at, end)
            elements.append(element)
    else:
        while at < end:
            element, at = _decode_element(field, kind, data, at, end)
            elements.append(element)
    return tuple(elements), at


def _decode_element(field: Field, kind: Repeat, data: Buffer, at: int, end: int) -> tuple[Any, int]:
    element = kind.element
    if isinstance(element, UInt):
        return _decode_number(replace(field, code=kind.code), element, data, at, end)
    layout: Layout = element.layout
    (length,) = layout.lengths
    if at + length > end:
        raise WireError(at, f"{length} bytes of {layout.owner}", f"{end - at}")
    values: dict[str, Any] = {}
    for item, number in zip(layout.parts[length].named, layout.parts[length].struct.unpack_from(data, at), strict=True):
        values[item.name] = number if item.code is None else item.code(number)
    at += length
    for item in layout.rest:
        values[item.name], at = layout._decode_field(item, data, at, end, None, values)
    for name in layout.counters:
        del values[name]
    return element(**values), at


def packed(packer: struct.Struct, owner: str, *numbers: int) -> bytes:
    """Pack the numbers; a number that does not fit raises a ValueError that names the owner."""
    try:
        return packer.pack(*numbers)
    except struct.error as error:
        raise ValueError(f"{owner}: {error} in {numbers}") from error


def _encode_element(element: Any, name: str, value: Any) -> bytes:
    if isinstance(element, UInt):
        return packed(_NUMBERS[element.size], name, value)
    fixed, rest = element.layout.encode(value, element.layout.lengths[0])
    return b"".join((fixed, *rest))


def _declared_fields(cls: type) -> Iterator[Field]:
    """The fields of a declared parent, then those that the class itself annotates, in order."""
    parent = getattr(cls, "layout", None)
    if isinstance(parent, Layout):
        yield from parent.fields
    for name, hint in inspect.get_annotations(cls).items():
        given = cls.__dict__.get(name, _MISSING)
        if isinstance(given, Reserved):
            yield Field(name, given)
        elif hasattr(hint, "__metadata__"):
            yield _annotated_field(name, hint, given)


def _annotated_field(name: str, hint: Any, default: Any) -> Field:
    python_type, *notes = typing.get_args(hint)
    kinds = [note for note in notes if isinstance(note, UInt | KeyBytes | RestBytes | CountedBytes | Repeat)]
    (kind,) = kinds
    only = next((note.lengths for note in notes if isinstance(note, Only)), ())
    when = next((note for note in notes if isinstance(note, When)), None)
    counts: tuple[str, ...] = ()
    if isinstance(default, CountOf):
        counts, default = default.names, _MISSING
    return Field(
        name,
        kind,
        code=_code_type(python_type) if isinstance(kind, UInt) else None,
        default=default,
        only=only,
        when=when,
        counts=counts,
        in_value=any(isinstance(note, InValue) for note in notes),
    )


def _code_type(python_type: Any) -> type[int] | None:
    """The enumeration behind ``State`` or ``State | None``; None for a plain ``int``."""
    members = typing.get_args(python_type) if isinstance(python_type, types.UnionType) else (python_type,)
    for member in members:
        if isinstance(member, type) and issubclass(member, int) and issubclass(member, enum.Enum):
            return member
    return None


T = TypeVar("T")


def declare(cls: type[T], layout: Layout) -> type[T]:
    """Turn a class of fields into a dataclass with this layout; lengths become computed properties."""
    cls.layout = layout  # type: ignore[attr-defined]
    for field in layout.fields:
        if field.counts and field.name in inspect.get_annotations(cls):
            del cls.__annotations__[field.name]
            setattr(cls, field.name, property(_counter(field.counts)))
    return dataclasses.dataclass(kw_only=True, slots=True)(cls)


def _counter(names: tuple[str, ...]) -> Callable[[Any], int]:
    return lambda values: sum(values.layout.size_of(name, values) for name in names)


@dataclass_transform(kw_only_default=True, field_specifiers=(count_of,))
def record(cls: type[T]) -> type[T]:
    """Declare a record for ``Repeat``: fields without a header."""
    return declare(cls, Layout(cls))
