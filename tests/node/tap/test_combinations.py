"""Every combination of the seven flags of the text against a model of what a client must see.

The model knows nothing of streams or windows. It says what a client is sent that connects at a certain moment, while
keys are written, overwritten and deleted before and after it; and it says what the flags promise about each message.
"""

import itertools

import pytest

from tests.support.in_memory_node import InMemoryNode
from tests.support.tap_peer import (
    ACK,
    BACKFILL,
    BYTE_ORDER,
    CHECKPOINT,
    DUMP,
    FUTURE,
    KEYS_ONLY,
    LIST,
    REGISTERED,
    TAKEOVER,
    TapPeer,
    brief,
    connect_with,
)
from upriver.model import VbucketState
from upriver.wire import Message, tap
from upriver.wire.dialects.tap import Control, TapFlag

SEVEN = (BACKFILL, DUMP, LIST, TAKEOVER, ACK, KEYS_ONLY, REGISTERED)
COMBINATIONS = [sum(chosen) for n in range(8) for chosen in itertools.combinations(SEVEN, n)]
LISTED = 1
#: Written before the connect, in two steps with time between them, and after it.
OLD = {1: [b"a", b"b", b"a"], 2: [b"c"]}
RECENT = {1: [b"d"], 2: [b"e", b"c"]}
LATER = {1: [b"f", b"a"], 2: [b"g"]}

Change = tuple[int, bytes]


def write(node: InMemoryNode, changes: dict[int, list[bytes]]) -> None:
    for vbucket, keys in changes.items():
        for key in keys:
            if node.bucket.vbucket(vbucket).state is VbucketState.ACTIVE:
                node.write(vbucket, key, value=b"value of " + key)


class Model:
    """What a client with these flags is promised."""

    def __init__(self, flags: int, date: str) -> None:
        self.flags = flags
        self.takeover = bool(flags & TAKEOVER)
        self.dump = bool(flags & DUMP) and not self.takeover
        self.vbuckets = {LISTED} if flags & LIST else {1, 2}
        self.wanted = date if flags & BACKFILL and not self.takeover else "everything"

    @property
    def existing(self) -> set[Change]:
        """Which changes of the past are sent: the newest of each key, as far back as was asked for."""
        if self.wanted == "future":
            return set()
        recent = {(vbucket, key) for vbucket, keys in RECENT.items() for key in keys}
        everything = recent | {(vbucket, key) for vbucket, keys in OLD.items() for key in keys}
        chosen = everything if self.wanted == "everything" else recent
        return {change for change in chosen if change[0] in self.vbuckets}

    @property
    def later(self) -> set[Change]:
        """Which changes follow."""
        if self.dump or self.takeover:
            return set()
        return {(vbucket, key) for vbucket, keys in LATER.items() for key in keys if vbucket in self.vbuckets}

    @property
    def closes(self) -> bool:
        return self.dump or self.takeover

    def controls(self) -> dict[str, int]:
        """How often each control comes before anything is written later."""
        streams = len(self.vbuckets) if self.wanted != "future" else 0
        registered = bool(self.flags & REGISTERED) and not self.dump
        return {
            "#enable_auto_nack": int(bool(self.flags & ACK)),
            "#initial_vbucket_stream": streams,
            "#close_backfill": streams,
            "#open_checkpoint": len(self.vbuckets) if registered else 0,
            "state pending": streams if self.takeover else 0,
            "state active": streams if self.takeover else 0,
            "#close_tap_stream": int(self.closes),
        }


def changes_in(messages: list[Message]) -> list[Change]:
    return [(m.vbucket, m.key) for m in messages if isinstance(m, tap.Mutation | tap.Delete)]


def check_marks(messages: list[Message], flags: int) -> None:
    for message in messages:
        marks = message.tap_flags  # type: ignore[attr-defined]
        if not flags & ACK:
            assert TapFlag.ACK not in marks
        elif not isinstance(message, tap.Mutation | tap.Delete):
            assert TapFlag.ACK in marks
        if isinstance(message, tap.Mutation):
            keys_only = bool(flags & KEYS_ONLY) and not flags & TAKEOVER  # a preference: a takeover needs values
            assert (TapFlag.NO_VALUE in marks) == keys_only
            assert (TapFlag.NETWORK_BYTE_ORDER in marks) == bool(flags & BYTE_ORDER)
            assert message.value == (b"" if keys_only else b"value of " + message.key)
            assert message.ttl == 255
    numbers = [message.opaque for message in messages]  # type: ignore[attr-defined]
    assert numbers == list(range(1, len(numbers) + 1))


def check_order(messages: list[Message]) -> None:
    """Of each vbucket: pending, begin, changes, end of the backfill, active."""
    order = [
        "state pending",
        "#initial_vbucket_stream",
        "change",
        "#close_backfill",
        "#open_checkpoint",
        "state active",
    ]
    for vbucket in (1, 2):
        of_it = [m for m in messages if m.vbucket == vbucket]  # type: ignore[attr-defined]
        places = [order.index("change" if changes_in([m]) else brief([m])[0]) for m in of_it]
        assert places == sorted(places)


@pytest.mark.parametrize("flags", COMBINATIONS, ids=lambda flags: f"0x{flags:02x}")
@pytest.mark.parametrize("date", ["everything", "recent", "future"])
@pytest.mark.parametrize("more", [0, BYTE_ORDER], ids=["", "byte order"])
def test_a_client_sees_what_its_flags_promise(flags: int, date: str, more: int) -> None:
    node = InMemoryNode()
    for vbucket in (1, 2):
        node.bucket.create_vbucket(vbucket)
    write(node, OLD)
    node.pass_by(100)
    since = int(node.clock())
    write(node, RECENT)
    node.disk_works = bool(flags & TAKEOVER)  # a dump is complete also with what is not on disk
    model = Model(flags, date)
    dates = {"everything": 0, "recent": since, "future": FUTURE}
    peer = TapPeer(node, connect_with(b"client", flags | more, dates[date], (LISTED,)))
    before = peer.run()

    check_marks(before, flags | more)
    check_order(before)
    assert sorted(changes_in(before)) == sorted(model.existing)
    told = brief(before)
    assert {name: told.count(name) for name in model.controls()} == model.controls()
    assert peer.closed == model.closes

    write(node, LATER)
    after = peer.run()
    assert sorted(changes_in(after)) == sorted(model.later)
    for vbucket in model.vbuckets:
        assert node.bucket.vbucket(vbucket).state is (VbucketState.DEAD if model.takeover else VbucketState.ACTIVE)


@pytest.mark.parametrize("flags", [flags for flags in COMBINATIONS if not flags & TAKEOVER], ids=lambda f: f"0x{f:02x}")
def test_checkpoints_come_only_to_clients_that_asked_for_them(flags: int) -> None:
    for more in (0, CHECKPOINT):
        node = InMemoryNode()
        node.bucket.create_vbucket(1)
        write(node, {1: OLD[1]})
        first = node.bucket.vbucket(1).checkpoints.open_id
        held = (tap.VbucketCheckpoint(vbucket=1, checkpoint=first),)
        peer = TapPeer(node, connect_with(b"client", flags | more, 0, (1,), held))
        messages = peer.run()
        sync = [m for m in messages if isinstance(m, tap.Opaque) and m.control is Control.ENABLE_CHECKPOINT_SYNC]
        assert len(sync) == bool(more)
        node.bucket.vbucket(1).checkpoints.create()
        write(node, {1: LATER[1]})
        messages += peer.run()
        found = [text for text in brief(messages) if text.startswith(("start of", "end of"))]
        expected = [f"start of {first}", f"end of {first}", f"start of {first + 1}"]
        assert found == (expected if more and not flags & DUMP else [])


def test_there_are_128_of_them() -> None:
    assert len(set(COMBINATIONS)) == 128
