"""What memcached does, written down with a dictionary, and operations that can be sent to anything that speaks it."""

import re
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from tests.support.command_peers import Peer
from upriver.wire import Request, Response
from upriver.wire import memcached as wire
from upriver.wire.codes import Status

NO_CREATE = 0xFFFFFFFF
TEXT_KEYS = [b"a", b"b", b"k" * 240]
NUMBER_KEYS = [b"m", b"n"]
#: Operations whose quiet form keeps silent about a success; those of the others keep silent about a miss.
STORES = ("set", "add", "replace", "append", "prepend", "increment", "decrement", "delete")
READS = ("get", "getk", "gat")

_REQUESTS: dict[str, tuple[Any, Any]] = {
    "set": (wire.Set, wire.SetQ),
    "add": (wire.Add, wire.AddQ),
    "replace": (wire.Replace, wire.ReplaceQ),
    "append": (wire.Append, wire.AppendQ),
    "prepend": (wire.Prepend, wire.PrependQ),
    "increment": (wire.Increment, wire.IncrementQ),
    "decrement": (wire.Decrement, wire.DecrementQ),
    "delete": (wire.Delete, wire.DeleteQ),
    "get": (wire.Get, wire.GetQ),
    "getk": (wire.GetK, wire.GetKQ),
    "gat": (wire.Gat, wire.GatQ),
    "touch": (wire.Touch, wire.Touch),
    "flush": (wire.Flush, wire.FlushQ),
    "noop": (wire.Noop, wire.Noop),
    "wait": (wire.Noop, wire.Noop),
}


@dataclass(frozen=True)
class Operation:
    """Something to do, without knowing any CAS."""

    name: str
    key: bytes = b""
    value: bytes = b""
    flags: int = 0
    expiration: int = 0
    delta: int = 1
    initial: int = 0
    #: Which CAS to send: none, the item's, or another.
    cas: str = ""
    quiet: bool = False
    #: For "wait": how many seconds pass.
    seconds: int = 0

    def request(self, cas: int) -> Request:
        """The packet that asks for it."""
        fields: dict[str, Any] = {} if self.name in ("noop", "wait", "flush") else {"key": self.key, "cas": cas}
        if self.name in ("set", "add", "replace"):
            fields |= {"value": self.value, "flags": self.flags, "expiration": self.expiration}
        elif self.name in ("append", "prepend"):
            fields["value"] = self.value
        elif self.name in ("increment", "decrement"):
            fields |= {"delta": self.delta, "initial": self.initial, "expiration": self.expiration}
        elif self.name in ("gat", "touch"):
            fields["expiration"] = self.expiration
        request = _REQUESTS[self.name][self.quiet](**fields)
        assert isinstance(request, Request)
        return request


@dataclass(frozen=True)
class Outcome:
    """What an answer says, but for its CAS."""

    status: Status
    value: bytes = b""
    flags: int = 0
    key: bytes = b""


def outcome(answer: Response) -> Outcome:
    """The part of an answer that does not depend on who gives it."""
    if answer.status is not Status.SUCCESS:
        return Outcome(answer.status)
    match answer:
        case wire.GetKResponse() | wire.GetKQResponse():
            return Outcome(answer.status, answer.value, answer.flags, answer.key)
        case wire.GetResponse():
            return Outcome(answer.status, answer.value, answer.flags)
        case wire.IncrementResponse():
            return Outcome(answer.status, b"%d" % answer.number)
        case wire.TouchResponse():
            return Outcome(answer.status, flags=answer.flags or 0)
        case _:
            return Outcome(answer.status)


def perform(peer: Peer, operation: Operation) -> Outcome | None:
    """Do it; None if nothing was answered."""
    cas = 0
    if operation.cas:
        current = peer.ask(wire.Get(key=operation.key))
        cas = current.cas if current.status is Status.SUCCESS else 1
        cas += operation.cas == "other"
    answers = peer.send(operation.request(cas))
    assert len(answers) <= 1
    if answers and operation.name in STORES and operation.name != "delete" and answers[0].status is Status.SUCCESS:
        assert answers[0].cas
        (got,) = peer.send(wire.Get(key=operation.key))
        assert got.status is not Status.SUCCESS or got.cas == answers[0].cas
    return outcome(answers[0]) if answers else None


@dataclass(frozen=True)
class _Item:
    value: bytes
    flags: int
    expires: float | None


class Refused(Exception):
    """The model's way to answer with a status."""

    def __init__(self, status: Status) -> None:
        super().__init__(status)
        self.status = status


class Model:
    """Memcached as a dictionary."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.items: dict[bytes, _Item] = {}

    def perform(self, operation: Operation) -> Outcome | None:
        """What is answered; None for nothing."""
        try:
            answer: Outcome | None = self._perform(operation)
        except Refused as refused:
            answer = Outcome(refused.status)
            if operation.quiet and operation.name in READS:
                answer = None
        else:
            if operation.quiet and operation.name in (*STORES, "flush"):
                answer = None
        return answer

    def _perform(self, operation: Operation) -> Outcome:
        name, key = operation.name, operation.key
        item = self._live(key)
        if name == "wait":
            self.now += operation.seconds
        elif name == "flush":
            self.items.clear()
        elif name in ("get", "getk"):
            found = self._present(item)
            return Outcome(Status.SUCCESS, found.value, found.flags, key if name == "getk" else b"")
        elif name in ("touch", "gat"):
            found = self._present(item)
            self.items[key] = replace(found, expires=self._expires(operation.expiration))
            return Outcome(Status.SUCCESS, found.value if name == "gat" else b"", found.flags)
        elif name in ("increment", "decrement"):
            return self._count(operation, item)
        elif name == "delete":
            self._check_cas(operation, self._present(item))
            del self.items[key]
        elif name in STORES:
            self._store(operation, item)
        return Outcome(Status.SUCCESS)

    def _store(self, operation: Operation, item: _Item | None) -> None:
        name, key = operation.name, operation.key
        if name == "add" and item is not None and not operation.cas:
            raise Refused(Status.KEY_EEXISTS)
        if name in ("append", "prepend"):
            if item is None:
                raise Refused(Status.NOT_STORED)
            self._check_cas(operation, item)
            joined = item.value + operation.value if name == "append" else operation.value + item.value
            self.items[key] = replace(item, value=joined)
            return
        if name == "replace" or operation.cas:
            self._check_cas(operation, self._present(item))
        self.items[key] = _Item(operation.value, operation.flags, self._expires(operation.expiration))

    def _count(self, operation: Operation, item: _Item | None) -> Outcome:
        if item is None:
            if operation.expiration == NO_CREATE:
                raise Refused(Status.KEY_ENOENT)
            number, flags, expires = operation.initial, 0, self._expires(operation.expiration)
        else:
            if item.value:
                self._check_cas(operation, item)
            found = re.match(rb"\s*([0-9]+)(?=[\s\0]|\Z)", item.value)
            if found is None or int(found[1]) >= 2**64:
                raise Refused(Status.DELTA_BADVAL)
            digits, flags, expires = found[1], item.flags, item.expires
            if operation.name == "increment":
                number = (int(digits) + operation.delta) % 2**64
            else:
                number = max(0, int(digits) - operation.delta)
        text = (b"%d" % number).ljust(len(item.value) if item is not None else 0)
        self.items[operation.key] = _Item(text, flags, expires)
        return Outcome(Status.SUCCESS, b"%d" % number)

    @staticmethod
    def _check_cas(operation: Operation, item: _Item) -> None:
        if operation.cas == "other":
            raise Refused(Status.KEY_EEXISTS)

    @staticmethod
    def _present(item: _Item | None) -> _Item:
        if item is None:
            raise Refused(Status.KEY_ENOENT)
        return item

    def _live(self, key: bytes) -> _Item | None:
        item = self.items.get(key)
        if item is not None and item.expires is not None and item.expires <= self.now:
            del self.items[key]
            return None
        return item

    def _expires(self, expiration: int) -> float | None:
        if not expiration:
            return None
        return expiration if expiration > 30 * 24 * 3600 else int(self.now) + expiration


def operations(expirations: st.SearchStrategy[int], *more: str) -> st.SearchStrategy[Operation]:
    """Operations on texts and, with keys of their own, on numbers."""
    common: dict[str, Any] = {
        "expiration": expirations,
        "quiet": st.booleans(),
        "flags": st.sampled_from([0, 1, 2**32 - 1]),
    }
    cas = st.sampled_from(["", "", "", "item", "other"])
    texts = st.builds(
        Operation,
        st.sampled_from(["set", "replace", "append", "prepend", "delete"]),
        key=st.sampled_from(TEXT_KEYS),
        value=st.binary(max_size=20),
        cas=cas,
        **common,
    )
    numbers = st.builds(
        Operation,
        st.sampled_from(["increment", "decrement"]),
        key=st.sampled_from(NUMBER_KEYS),
        delta=st.one_of(st.integers(0, 20), st.just(2**64 - 1)),
        initial=st.one_of(st.integers(0, 20), st.just(2**64 - 1)),
        cas=cas,
        **(common | {"expiration": st.one_of(expirations, st.just(NO_CREATE))}),
    )
    set_numbers = st.builds(
        Operation,
        st.sampled_from(["set", "add", "replace"]),
        key=st.sampled_from(NUMBER_KEYS),
        value=st.sampled_from(
            [b"0", b"1", b"41", b"18446744073709551615", b"99 ", b" 1", b"5 5", b"1000", b"", b"words"]
        ),
        cas=cas,
        **common,
    )
    others = st.builds(
        Operation,
        st.sampled_from(["get", "getk", "gat", "touch", "add", "noop", *more]),
        key=st.sampled_from(TEXT_KEYS + NUMBER_KEYS),
        value=st.sampled_from([b"7", b"8"]),
        seconds=st.integers(1, 6),
        **common,
    )
    return st.one_of(texts, numbers, set_numbers, others)
