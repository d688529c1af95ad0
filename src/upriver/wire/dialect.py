"""A dialect: decorators fill the table of its messages, and decoding is driven by that table.

A dialect may extend another: messages that it does not declare are looked up there. `dcp` extends `upr`, which
extends the memcached commands, so one connection can say hello, authenticate and open a stream.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from upriver.errors import WireError
from upriver.model import Event
from upriver.wire.codes import Magic, Sender, Status
from upriver.wire.framing import DRAFT, EXTRAS_LENGTH_AT, OPCODE_AT, STATUS_AT, Framing, u16_at
from upriver.wire.layout import Buffer, Layout, declare
from upriver.wire.message import AnyRequest, AnyResponse, Declaration, Message

M = TypeVar("M", bound=Message)


class Dialect:
    """The messages of one text."""

    def __init__(self, name: str, *, framing: Framing, document: str, extends: "Dialect | None" = None) -> None:
        self.name = name
        self.framing = framing
        self.document = document
        self.extends = extends
        self.messages: list[type[Message]] = []
        #: Requests by opcode and length of extras, because one opcode may have several layouts.
        self._requests: dict[int, dict[int, type[Message]]] = {}
        self._merged: dict[int, dict[int, type[Message]]] = {}
        self._responses: dict[tuple[int, int], type[Message]] = {}
        self._drafts: dict[tuple[int, int | None], type[Message]] = {}
        #: Opcodes whose requests are also accepted with the magic of a response.
        self._mislabelled: set[int] = set()

    def __repr__(self) -> str:
        return f"<dialect {self.name}>"

    # Declaring

    def request(
        self,
        opcode: int,
        *,
        sender: Sender = Sender.CLIENT,
        extras: tuple[int, ...] = (),
        private: str | None = None,
        either: bool = False,
        change: Event | None = None,
        any_magic: bool = False,
        answered: bool = True,
        errors: Mapping[Status, str] | None = None,
    ) -> Callable[[type[M]], type[M]]:
        """Declare a request.

        ``extras`` lists the allowed lengths of the fixed part, if there are several. ``private`` names the field that
        holds the length of TAP's engine-private part, which then belongs to the fixed part.
        """

        def decorate(cls: type[M]) -> type[M]:
            declaration = Declaration(
                dialect=self.name,
                opcode=opcode,
                sender=sender,
                either=either,
                change=change,
                answered=answered,
                errors=tuple((errors or {}).items()),
            )
            made = self._declare(cls, declaration, Layout(cls, extras, private))
            for length in _extras_lengths(made):
                where = f"opcode 0x{opcode:02x} with {length} bytes of extras"
                _claim(self._requests.setdefault(opcode, {}), length, made, where)
            if any_magic:
                self._mislabelled.add(opcode)
            return made

        return decorate

    def response(
        self,
        opcode: int,
        *,
        status: Status | tuple[Status, ...] = Status.SUCCESS,
        extras: tuple[int, ...] = (),
        either: bool = False,
    ) -> Callable[[type[M]], type[M]]:
        """Declare the body of a response with this status."""
        statuses = status if isinstance(status, tuple) else (status,)

        def decorate(cls: type[M]) -> type[M]:
            declaration = Declaration(dialect=self.name, opcode=opcode, statuses=statuses, either=either)
            cls.__annotations__["status"] = Status
            cls.status = statuses[0]  # type: ignore[attr-defined]
            made = self._declare(cls, declaration, Layout(cls, extras))
            for each in statuses:
                _claim(self._responses, (opcode, each), made, f"opcode 0x{opcode:02x} with status {each.label}")
            return made

        return decorate

    def message(
        self,
        opcode: int,
        type_code: int | None = None,
        *,
        sender: Sender = Sender.PRODUCER,
        lengths: tuple[int, ...] = (),
        change: Event | None = None,
        errors: Mapping[Status, str] | None = None,
    ) -> Callable[[type[M]], type[M]]:
        """Declare a message of the 12-byte header, selected by opcode and type byte."""

        def decorate(cls: type[M]) -> type[M]:
            declaration = Declaration(
                dialect=self.name,
                opcode=opcode,
                type_code=type_code,
                sender=sender,
                change=change,
                errors=tuple((errors or {}).items()),
            )
            made = self._declare(cls, declaration, Layout(cls, lengths))
            _claim(self._drafts, (opcode, type_code), made, f"opcode {opcode} with type {type_code}")
            return made

        return decorate

    def _declare(self, cls: type[M], declaration: Declaration, layout: Layout) -> type[M]:
        cls.declaration = declaration
        made = declare(cls, layout)
        self.messages.append(made)
        return made

    # Decoding

    def decode(self, packet: Buffer) -> Message:
        """Decode one complete packet. A wrong body raises, but does not desynchronise the stream."""
        self.framing.check_packet(packet)
        return self.class_of(packet).decode(packet)

    def class_of(self, packet: Buffer) -> type[Message]:
        """The message class of a packet. The framing has already checked the lengths in its header."""
        if self.framing is DRAFT:
            return self._draft_class(packet)
        if packet[0] == Magic.RESPONSE and not self._is_mislabelled(packet):
            return self._response_class(packet)
        return self._request_class(packet)

    def _is_mislabelled(self, packet: Buffer) -> bool:
        """Whether this is a request with the magic of a response. A real response never has extras of these lengths."""
        opcode = packet[OPCODE_AT]
        return opcode in self._mislabelled and packet[EXTRAS_LENGTH_AT] in self._layouts_of(opcode)

    def _request_class(self, packet: Buffer) -> type[Message]:
        known, extras = self._layouts_of(packet[OPCODE_AT]), packet[EXTRAS_LENGTH_AT]
        if extras in known:
            return known[extras]
        if not known:
            return AnyRequest
        lengths = " or ".join(str(length) for length in sorted(known))
        title = next(reversed(known.values())).title()
        raise WireError(EXTRAS_LENGTH_AT, f"{lengths} bytes of extras in {title}", f"{extras}")

    def _layouts_of(self, opcode: int) -> dict[int, type[Message]]:
        """The request classes of an opcode by the length of their extras, inherited ones included."""
        if opcode not in self._merged:
            inherited = {} if self.extends is None else self.extends._layouts_of(opcode)
            self._merged[opcode] = {**inherited, **self._requests.get(opcode, {})}
        return self._merged[opcode]

    def _response_class(self, packet: Buffer) -> type[Message]:
        key = packet[OPCODE_AT], u16_at(packet, STATUS_AT)
        return next((d._responses[key] for d in self._chain() if key in d._responses), AnyResponse)

    def _draft_class(self, packet: Buffer) -> type[Message]:
        known = {key[1]: cls for d in self._chain() for key, cls in d._drafts.items() if key[0] == packet[0]}
        if None in known:
            return known[None]
        if not known:
            raise WireError(0, f"an opcode of {self.name}", f"0x{packet[0]:02x}")
        if len(packet) < 13:
            raise WireError(8, "a body that begins with a type", "an empty body")
        key = packet[0], packet[12]
        for dialect in self._chain():
            if key in dialect._drafts:
                return dialect._drafts[key]
        types = " or ".join(str(int(kind or 0)) for kind in sorted(known, key=str))
        raise WireError(12, f"type {types}", f"{packet[12]}")

    def _chain(self) -> Iterator["Dialect"]:
        dialect: Dialect | None = self
        while dialect is not None:
            yield dialect
            dialect = dialect.extends

    # Looking up

    def all_messages(self) -> Iterator[type[Message]]:
        """Every message that this dialect decodes: its own, then those of the dialect that it extends."""
        for dialect in self._chain():
            yield from dialect.messages

    def stream_messages(self) -> Iterator[type[Message]]:
        """Its own messages and those of the stream dialects that it extends, without the memcached commands."""
        for dialect in self._chain():
            if dialect.name != "memcached":
                yield from dialect.messages

    def change_messages(self) -> Iterator[type[Message]]:
        """The messages that report a change of a key, inherited ones first."""
        for dialect in reversed(list(self._chain())):
            yield from (m for m in dialect.messages if m.declaration.change is not None)

    def request_title(self, opcode: int) -> str | None:
        """The title of the request with this opcode."""
        for dialect in self._chain():
            for cls in dialect._requests.get(opcode, {}).values():
                return cls.title()
        return None

    def responses_to(self, opcode: int) -> Iterable[type[Message]]:
        """The declared responses to an opcode."""
        seen: set[int] = set()
        for dialect in self._chain():
            for (code, status), cls in dialect._responses.items():
                if code == opcode and status not in seen:
                    seen.add(status)
                    yield cls


def _extras_lengths(cls: type[Message]) -> tuple[int, ...]:
    layout = cls.layout
    return (0, *layout.lengths) if cls.declaration.either else layout.extras_lengths


def _claim(table: dict[Any, type[Message]], key: Any, cls: type[Message], where: str) -> None:
    taken = table.setdefault(key, cls)
    if taken is not cls:
        raise TypeError(f"{cls.__name__}: {where} is already declared by {taken.__name__}")
