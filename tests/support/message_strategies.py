"""Hypothesis strategies derived from the declarations: any instance of any declared message.

Nothing here knows a message by name. The layout of a class says which fields it has, how large they are and which
of them exclude or count each other, so a new message is tested from the moment it is declared.
"""

import enum
from functools import cache
from typing import Any

from hypothesis import strategies as st

from upriver.wire import DIALECTS, AnyRequest, AnyResponse, Dialect, Message, Request, Response
from upriver.wire.codes import Status
from upriver.wire.fields import CountedBytes, KeyBytes, Repeat, Reserved, RestBytes, UInt
from upriver.wire.layout import Field, Layout
from upriver.wire.message import DraftMessage

#: Long enough to cross every length that a layout may mistake for another.
BYTES_MAX = 40


@cache
def numbers(size: int) -> st.SearchStrategy[int]:
    """Numbers of this many bytes."""
    return st.integers(0, 2 ** (8 * size) - 1)


def codes(kind: type[int], size: int) -> st.SearchStrategy[int]:
    """Codes with a name, and numbers without one."""
    assert issubclass(kind, enum.Enum)
    return st.one_of(st.sampled_from(list(kind)), numbers(size).map(kind))


@st.composite
def messages(draw: st.DrawFn, cls: type[Message]) -> Message:
    """Instances of one declared message, over all lengths that its fixed part may have."""
    header = {name: draw(values) for name, values in _header_fields(cls).items()}
    return cls(**{**header, **_body(draw, cls, draw(st.sampled_from(cls.layout.lengths)))})


def unknown_messages(dialect: Dialect) -> st.SearchStrategy[Message]:
    """Requests with an undeclared opcode, and answers to anything with a status that no class claims."""
    undeclared = [opcode for opcode in range(256) if dialect.request_title(opcode) is None]
    body = {name: st.binary(max_size=BYTES_MAX) for name in ("extras", "key", "value")}
    return st.one_of(
        st.builds(AnyRequest, opcode=st.sampled_from(undeclared), **body, **_header_fields(AnyRequest)),
        st.builds(AnyResponse, opcode=numbers(1), **body, **{**_header_fields(Response), "status": _unclaimed()}),
    )


def any_message(dialect: Dialect) -> st.SearchStrategy[Message]:
    """Any message that the dialect itself declares."""
    return st.one_of([messages(cls) for cls in dialect.messages])


def dialects() -> st.SearchStrategy[Dialect]:
    """Any dialect."""
    return st.sampled_from(list(DIALECTS.values()))


def _unclaimed() -> st.SearchStrategy[Status]:
    return st.integers(0x100, 0xFFFF).map(Status)


def _header_fields(cls: type[Message]) -> dict[str, st.SearchStrategy[Any]]:
    if issubclass(cls, DraftMessage):
        return {"request_id": numbers(4)}
    common: dict[str, st.SearchStrategy[Any]] = {"opaque": numbers(4), "datatype": numbers(1), "cas": numbers(8)}
    if issubclass(cls, Request):
        return {**common, "vbucket": numbers(2)}
    assert issubclass(cls, Response)
    if cls is Response:
        return common
    return {**common, "status": st.sampled_from(cls.declaration.statuses)}


def _body(draw: st.DrawFn, cls: type[Message], length: int) -> dict[str, Any]:
    """The arguments for a body whose fixed part has this length."""
    layout = cls.layout
    absent = {field.name for field in layout.parts[length].absent}
    # A draft cannot tell an empty key before a value from none.
    key_size = 1 if issubclass(cls, DraftMessage) and layout.has_key and layout.has_value else 0
    out: dict[str, Any] = {}
    for field in layout.fields:
        if field.name in absent or field.counts or isinstance(field.kind, Reserved):
            continue
        if field.when is not None and not out.get(field.when.field, 0) & field.when.mask:
            continue
        if layout.counted.get(field.name) in absent:
            continue
        if field.when is not None and field.when.optional and draw(st.booleans()):
            continue
        out[field.name] = draw(_values(field, key_size if field.is_key else 0))
    return out


def _values(field: Field, size_min: int = 0) -> st.SearchStrategy[Any]:
    kind = field.kind
    if isinstance(kind, UInt):
        return numbers(kind.size) if field.code is None else codes(field.code, kind.size)
    if isinstance(kind, Repeat):
        return st.lists(_elements(kind), max_size=5).map(tuple)
    assert isinstance(kind, KeyBytes | RestBytes | CountedBytes)
    return st.binary(min_size=size_min, max_size=BYTES_MAX)


def _elements(kind: Repeat) -> st.SearchStrategy[Any]:
    if isinstance(kind.element, UInt):
        size = kind.element.size
        return numbers(size) if kind.code is None else codes(kind.code, size)
    layout: Layout = kind.element.layout
    return st.fixed_dictionaries({field.name: _values(field) for field in layout.fields if not field.counts}).map(
        lambda values: kind.element(**values)
    )
