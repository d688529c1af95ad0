"""The rollback rules, stated twice more: in other words, and as what they are for.

What they are for is checked by brute force. Copies of one vbucket write, follow each other, lose their tail, are
promoted side by side; consumers stop anywhere in a stream. Then every consumer asks every copy to go on. If the
rule lets it, it must end with the copy's contents; if not, the point that it is sent back to must be one at which
both histories had the same contents.
"""

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import examples
from upriver.errors import KeyNotFound, OutOfRange
from upriver.model import FailoverEntry, FailoverLog, Snapshot, StreamPosition
from upriver.model.rollback import rollback_by_entry, rollback_by_snapshot

SMALL = st.integers(0, 12)
#: The log's own uuids are 100 and up, newest first.
UUIDS = st.sampled_from((99, 100, 100, 101, 101, 102, 103))
CASES = 6000


@st.composite
def logs(draw: st.DrawFn) -> FailoverLog:
    seqnos = draw(st.lists(SMALL, min_size=1, max_size=5))
    return FailoverLog(tuple(FailoverEntry(100 + place, seqno) for place, seqno in enumerate(seqnos)))


@st.composite
def positions(draw: st.DrawFn) -> StreamPosition:
    start, seqno, end = sorted(draw(st.tuples(SMALL, SMALL, SMALL)))
    return StreamPosition(draw(UUIDS), seqno, Snapshot(start, end))


def shared_with(log: FailoverLog, high: int, uuid: int) -> int | None:
    """The last seqno before any branch that began after this uuid's; None if the log does not have the uuid."""
    reach = high
    for entry in log:
        if entry.vbucket_uuid == uuid:
            return reach
        reach = min(reach, entry.seqno)
    return None


# In other words


@settings(max_examples=examples(400))
@given(logs(), SMALL, SMALL, positions())
def test_by_snapshot_a_consumer_needs_all_of_a_snapshot_that_it_is_in(
    log: FailoverLog, high: int, purge: int, position: StreamPosition
) -> None:
    shared = shared_with(log, high, position.vbucket_uuid)
    inside = position.snapshot.start < position.seqno < position.snapshot.end
    needed = position.snapshot.end if inside else position.seqno
    if position.seqno == 0:
        expected = None
    elif shared is None or position.seqno < purge:
        expected = 0
    elif needed <= shared:
        expected = None
    else:
        expected = min(shared, position.consistent_seqno)
    assert rollback_by_snapshot(log, high, purge, position) == expected


@settings(max_examples=examples(400))
@given(logs(), SMALL, SMALL, positions())
def test_by_snapshot_one_never_rolls_forward(log: FailoverLog, high: int, purge: int, position: StreamPosition) -> None:
    answer = rollback_by_snapshot(log, high, purge, position)
    assert answer is None or answer <= position.consistent_seqno


@settings(max_examples=examples(400))
@given(logs(), SMALL, SMALL, positions())
def test_by_snapshot_who_has_rolled_back_is_accepted_or_starts_over(
    log: FailoverLog, high: int, purge: int, position: StreamPosition
) -> None:
    answer = rollback_by_snapshot(log, high, purge, position)
    if answer is not None:
        again = StreamPosition.at(position.vbucket_uuid, answer)
        assert rollback_by_snapshot(log, high, purge, again) in (None, 0)


@settings(max_examples=examples(400))
@given(logs(), SMALL, SMALL, SMALL, UUIDS, SMALL, st.booleans(), st.booleans())
def test_by_entry_a_consumer_must_name_an_entry_of_the_log(
    log: FailoverLog, high: int, purge: int, start: int, uuid: int, entry_seqno: int, differs: bool, strict: bool
) -> None:
    place = log.index(uuid)
    listed = log.entries[place].seqno if place is not None else entry_seqno
    entry = FailoverEntry(uuid, entry_seqno if differs else listed)
    shared = shared_with(log, high, uuid)

    def ask() -> int | None:
        return rollback_by_entry(log, high, purge, start, entry, with_errors=strict)

    if start == 0:
        assert ask() is None
    elif shared is None and strict:
        with pytest.raises(KeyNotFound):
            ask()
    elif shared is None or start < purge or entry not in tuple(log):
        assert ask() == 0
    elif start <= shared:
        assert ask() is None
    elif entry == log.newest and strict:
        with pytest.raises(OutOfRange):
            ask()
    else:
        assert ask() == shared


# Single cases


@pytest.mark.parametrize(
    ("position", "answer"),
    [
        (StreamPosition(2, 5, Snapshot(5, 9)), None),  # not begun: nothing of it is there
        (StreamPosition(2, 5, Snapshot(3, 5)), None),  # completed
        (StreamPosition(2, 5, Snapshot(3, 6)), None),  # all of it is shared
        (StreamPosition(2, 5, Snapshot(3, 7)), 3),  # the end lies on the lost branch
        (StreamPosition(2, 7, Snapshot(7, 9)), 6),
        (StreamPosition(2, 9, Snapshot(7, 9)), 6),
        (StreamPosition(1, 9, Snapshot(7, 9)), None),  # on the newest branch
        (StreamPosition(3, 5, Snapshot(5, 5)), 0),  # on an unknown branch
        (StreamPosition(1, 1, Snapshot(1, 1)), 0),  # behind the purge
        (StreamPosition(3, 0, Snapshot(0, 9)), None),  # nothing received: nothing to take back
    ],
)
def test_by_snapshot_after_a_branch_at_6(position: StreamPosition, answer: int | None) -> None:
    log = FailoverLog((FailoverEntry(1, 6), FailoverEntry(2, 0)))
    assert rollback_by_snapshot(log, 10, 2, position) == answer


# The specification's own example


def test_the_example_of_the_transport_specification_rolls_back_to_zero() -> None:
    """A known uuid with a high seqno that is not the entry's (text 000, stream request)."""
    log = FailoverLog(
        (
            FailoverEntry(0xFEEDDECA, 0x5432),
            FailoverEntry(0xDECAFE, 0x1343214),
            FailoverEntry(0xFEEDFACE, 4),
            FailoverEntry(0xDEADBEEF, 0x6524),
        )
    )
    asked = FailoverEntry(0xFEEDDECA, 0)
    assert rollback_by_entry(log, 0xFFFFFFF, 0, 0xFFEEDD, asked, with_errors=True) == 0
    assert rollback_by_entry(log, 0xFFFFFFF, 0, 0, asked, with_errors=True) is None


def test_a_refusal_says_which_uuid_or_seqno() -> None:
    log = FailoverLog.fresh(0xABC)
    with pytest.raises(KeyNotFound, match="0xdef"):
        rollback_by_entry(log, 10, 0, 5, FailoverEntry(0xDEF, 0), with_errors=True)
    with pytest.raises(OutOfRange, match="start seqno 11 is above the high seqno 10"):
        rollback_by_entry(log, 10, 0, 11, FailoverEntry(0xABC, 0), with_errors=True)
    assert rollback_by_entry(log, 10, 0, 11, FailoverEntry(0xABC, 0), with_errors=False) == 10


# What they are for

Contents = dict[str, int]


@dataclass(frozen=True)
class Write:
    """A version of a key; ``version`` is unique among all writes of all copies, 0 for a deletion."""

    seqno: int
    key: str
    version: int


@dataclass
class Copy:
    """A copy of the vbucket that can be written to, read from and followed."""

    log: FailoverLog
    writes: list[Write] = field(default_factory=list)
    high: int = 0
    purge: int = 0
    #: Where the copy is whole: a snapshot ends nowhere else.
    ends: list[int] = field(default_factory=list)

    def newest(self, after: int, upto: int) -> dict[str, Write]:
        return {w.key: w for w in self.writes if after < w.seqno <= upto}

    def states(self) -> list[int]:
        """Where one could go back to: what was purged cannot come again."""
        return [end for end in (0, *self.ends) if end >= self.purge]

    def contents(self, upto: int) -> Contents:
        return live(self.newest(0, upto))


@dataclass
class Consumer:
    """Somebody who read from 0 and stopped; ``source`` is what the copy was then."""

    source: Copy
    position: StreamPosition
    data: dict[str, Write]


def live(newest: dict[str, Write]) -> Contents:
    return {key: write.version for key, write in newest.items() if write.version}


class World:
    """Copies and consumers, driven by a random script."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.uuid = self.version = 0
        self.copies = [Copy(FailoverLog.fresh(self.new_uuid()))]
        self.consumers: list[Consumer] = []
        self.script: list[str] = []

    def new_uuid(self) -> int:
        self.uuid += 1
        return self.uuid

    def run(self) -> None:
        actions = (self.write, self.write, self.write, self.follow, self.crash, self.purge, self.read, self.read)
        for _ in range(self.rng.randrange(4, 16)):
            action = self.rng.choice(actions)
            self.script.append(action(self.rng.choice(self.copies)))

    def write(self, copy: Copy) -> str:
        for _ in range(self.rng.randrange(1, 4)):
            self.version += 1
            copy.high += 1
            version = 0 if self.rng.random() < 0.2 else self.version
            copy.writes.append(Write(copy.high, self.rng.choice("ab"), version))
            copy.ends.append(copy.high)
        return f"{self.copies.index(copy)} writes up to {copy.high}"

    def follow(self, source: Copy) -> str:
        """A replica is promoted: whole up to one point, and perhaps inside the snapshot after it."""
        whole = self.rng.choice(source.states())
        later = [end for end in source.ends if end > whole]
        partial: list[Write] = []
        if later and self.rng.random() < 0.6:
            items = sorted(source.newest(whole, self.rng.choice(later)).values(), key=lambda w: w.seqno)
            partial = items[: self.rng.randrange(len(items) + 1)]
        high = partial[-1].seqno if partial else whole
        made = Copy(
            source.log.branch(self.new_uuid(), whole),
            [w for w in source.writes if w.seqno <= whole] + partial,
            high,
            source.purge,
            [end for end in source.ends if end <= whole] + [high],
        )
        self.copies.append(made)
        return f"{len(self.copies) - 1} follows {self.copies.index(source)} whole to {whole}, in part to {high}"

    def crash(self, copy: Copy) -> str:
        """The tail that was not on disk is lost."""
        kept = self.rng.choice(copy.states())
        copy.writes = [w for w in copy.writes if w.seqno <= kept]
        copy.ends = [end for end in copy.ends if end <= kept]
        copy.high = kept
        copy.log = copy.log.branch(self.new_uuid(), kept)
        return f"{self.copies.index(copy)} falls back to {kept}"

    def purge(self, copy: Copy) -> str:
        copy.purge = self.rng.choice(copy.states())
        newest = copy.newest(0, copy.purge)
        copy.writes = [w for w in copy.writes if w.seqno > copy.purge or (newest[w.key] == w and w.version)]
        return f"{self.copies.index(copy)} purges up to {copy.purge}"

    def read(self, copy: Copy) -> str:
        """A consumer reads from 0, in one or two snapshots, and stops somewhere."""
        position, data = StreamPosition.at(copy.log.newest.vbucket_uuid, 0), dict[str, Write]()
        for _ in range(self.rng.randrange(1, 3)):
            later = [end for end in copy.ends if end > max(position.seqno, copy.purge)]
            if not later or position.consistent_seqno != position.seqno:
                break
            end = self.rng.choice(later)
            items = sorted(copy.newest(position.seqno, end).values(), key=lambda w: w.seqno)
            position = position.announced(Snapshot(position.seqno, end))
            for item in items[: self.rng.randrange(len(items) + 1)]:
                data[item.key] = item
                position = position.advanced(item.seqno)
        source = Copy(copy.log, list(copy.writes), copy.high, copy.purge, list(copy.ends))
        self.consumers.append(Consumer(source, position, data))
        return f"a consumer reads {self.copies.index(copy)} to {position}"

    def check(self, consumer: Consumer, copy: Copy, resume: int, answer: int | None) -> None:
        """The consumer was told to resume at its position (None), or to roll back to the answer."""
        if answer is None:
            # A consumer that rolled back by itself has restored the state that its source had there.
            stays = resume == consumer.position.seqno
            held = consumer.data if stays else consumer.source.newest(0, resume)
            reached = live({**held, **copy.newest(resume, copy.high)})
            assert reached == copy.contents(copy.high), self.story(consumer, copy)
        else:
            assert answer <= resume, self.story(consumer, copy)
            if answer >= max(copy.purge, consumer.source.purge):  # below it the contents are unknown
                assert consumer.source.contents(answer) == copy.contents(answer), self.story(consumer, copy)

    def story(self, consumer: Consumer, copy: Copy) -> str:
        return "\n".join([*self.script, f"{consumer.position} asks {copy}"])


def worlds() -> list[World]:
    out = []
    for seed in range(CASES):
        world = World(random.Random(seed))
        world.run()
        out.append(world)
    return out


def test_by_snapshot_who_goes_on_ends_alike_and_who_goes_back_finds_a_common_point() -> None:
    outcomes: Counter[str] = Counter()
    for world in worlds():
        for consumer, copy in itertools.product(world.consumers, world.copies):
            position = consumer.position
            answer = rollback_by_snapshot(copy.log, copy.high, copy.purge, position)
            world.check(consumer, copy, position.seqno, answer)
            outcomes[kind_of(answer)] += position.seqno > 0
    assert min(outcomes[kind] for kind in ("go on", "roll back", "start over")) > CASES // 10, outcomes


def test_by_entry_a_consumer_that_compares_logs_first_is_as_safe() -> None:
    outcomes: Counter[str] = Counter()
    for world in worlds():
        for consumer, copy in itertools.product(world.consumers, world.copies):
            request = request_by_entry(consumer, copy.log)
            if request is None or request[1] < consumer.source.purge:
                continue
            entry, start = request
            try:
                answer = rollback_by_entry(copy.log, copy.high, copy.purge, start, entry, with_errors=True)
            except OutOfRange:
                outcomes["out of range"] += 1
                continue
            world.check(consumer, copy, start, answer)
            outcomes[kind_of(answer)] += start > 0
    assert min(outcomes[kind] for kind in ("go on", "roll back", "start over")) > CASES // 100, outcomes


def kind_of(answer: int | None) -> str:
    return "go on" if answer is None else "roll back" if answer else "start over"


def request_by_entry(consumer: Consumer, theirs: FailoverLog) -> tuple[FailoverEntry, int] | None:
    """What a careful consumer asks: an entry that both know, and a start that this entry vouches for."""
    own = list(consumer.source.log)
    place = next((place for place, entry in enumerate(own) if entry in tuple(theirs)), None)
    if place is None:
        return None
    if own[0] == theirs.newest:
        return own[0], consumer.position.seqno
    return own[place], min([consumer.position.consistent_seqno, *(entry.seqno for entry in own[:place])])
