"""What really happened: every change of every branch, also if all machines have forgotten it since.

Each failover uuid is one branch of a tree. Everything that an active copy writes is recorded here, so the contents of a
vbucket at any (uuid, seqno) are known. A copy that claims to be consistent at a position is compared with them at once,
long before the end. For every acknowledged write this module knows whether it is on the branches that are left and, if
not, whether a promotion gave it up.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from upriver.engine import StoredItem, Vbucket
from upriver.model import Event, FailoverEntry, FailoverLog
from upriver.model.record import PREFIX, aligned, size_at, unpack


class Violation(AssertionError):
    """A rule was broken."""


@dataclass(frozen=True, slots=True)
class Version:
    """One state of one key: all that a consumer must end up with."""

    seqno: int
    event: Event
    key: bytes
    value: bytes
    flags: int
    expiry: int
    cas: int
    rev_seqno: int
    datatype: int

    def __str__(self) -> str:
        mark = {Event.MUTATION: "", Event.DELETION: "-", Event.EXPIRATION: "!"}[self.event]
        return f"{mark}{self.key.decode()}@{self.seqno}"

    @property
    def live(self) -> bool:
        return self.event == Event.MUTATION


Contents = dict[bytes, Version]


def version(
    seqno: int, event: int, key: bytes, value: bytes, flags: int, expiry: int, cas: int, rev_seqno: int, datatype: int
) -> Version:
    """A version, without what a deletion does not say on every wire."""
    if event != Event.MUTATION:
        flags = expiry = datatype = 0
    return Version(seqno, Event(event), bytes(key), bytes(value), flags, expiry, cas, rev_seqno, datatype)


def of_item(key: bytes, item: StoredItem) -> Version:
    return version(
        item.seqno, item.event, key, item.value, item.flags, item.expiry, item.cas, item.rev_seqno, item.datatype
    )


def contents_of(vbucket: Vbucket, keys: list[bytes]) -> Contents:
    """What a copy holds now, tombstones included."""
    found = ((key, vbucket.table.find(key)) for key in keys)
    return {key: of_item(key, item) for key, item in found if item is not None}


def describe(contents: Contents) -> str:
    return "{" + " ".join(str(found) for _, found in sorted(contents.items())) + "}"


def without(contents: Contents, **fields: bytes | int) -> Contents:
    """The same, with these fields as if they were not told."""
    return {key: replace(found, **fields) for key, found in contents.items()}  # type: ignore[arg-type]


def live(contents: Contents) -> Contents:
    return {key: found for key, found in contents.items() if found.live}


class Branch:
    """What was written under one uuid, after ``start`` of its parent."""

    def __init__(self, uuid: int, parent: "Branch | None", start: int) -> None:
        self.uuid = uuid
        self.parent = parent
        self.start = start
        #: A promotion in mid-snapshot makes what it holds of the snapshot part of the new branch.
        self.adopted_to = start
        self.high_seqno = start
        self.history: list[Version] = []
        #: A promotion elsewhere gave up what lies beyond.
        self.given_up_beyond: int | None = None

    def contents(self, seqno: int) -> Contents:
        """What the vbucket held at this seqno, tombstones included."""
        state = {} if self.parent is None else self.parent.contents(min(seqno, self.start))
        for found in self.history:
            if found.seqno > seqno:
                break
            state[found.key] = found
        return state

    def holds(self, wanted: Version) -> bool:
        """Was this very version written on this branch or on those that led to it?"""
        branch: Branch | None = self
        while branch is not None:
            if wanted in branch.history:
                return True
            branch = branch.parent
        return False


class Truth:
    """All branches of one vbucket."""

    def __init__(self, vbucket: int, keys: list[bytes]) -> None:
        self.vbucket = vbucket
        self.keys = keys
        self.branches: dict[int, Branch] = {}
        #: Writes that were acknowledged when on disk: (uuid, version).
        self.acknowledged: list[tuple[int, Version]] = []

    # Watching the active.

    def watch(self, copy: Vbucket, who: str, *, given_up: bool) -> list[Version]:
        """Note what an active copy has done since the last look, and return it.

        A branch that is new to us must begin with what the log says that it shares. ``given_up``: an operator promoted
        this copy and knows that what it had not received is lost.
        """
        branch = self.branches.get(copy.failover_log.newest.vbucket_uuid)
        if branch is None:
            branch = self._begin(copy, who, given_up=given_up)
        table, known = copy.table, len(branch.history)
        while branch.high_seqno < table.high_seqno:
            records, last = table.records(branch.high_seqno, table.high_seqno, 2**20)
            offset = 0
            while offset < len(records):
                change = unpack(records, offset).change
                offset += aligned(size_at(records, offset))
                branch.history.append(
                    version(
                        change.seqno, change.event, change.key, change.value,
                        change.flags, change.expiry, change.cas, change.rev_seqno, change.datatype,
                    )
                )  # fmt: skip
            if last <= branch.high_seqno:
                raise Violation(f"{who}: the active lacks its changes after {branch.high_seqno}")
            branch.high_seqno = last
        return branch.history[known:]

    def _begin(self, copy: Vbucket, who: str, *, given_up: bool) -> Branch:
        entries = copy.failover_log.entries
        uuid, start = entries[0].vbucket_uuid, entries[0].seqno
        if len(entries) == 1:
            if start or copy.high_seqno:
                raise Violation(f"{who}: a new log begins at {start} with high seqno {copy.high_seqno}")
            branch = Branch(uuid, None, 0)
        else:
            parent = self._parent(entries[1:], who)
            branch = Branch(uuid, parent, start)
            self._adopt(copy, branch, parent, who)
            if not given_up:
                self._check_nothing_lost(branch, who)
        self.branches[uuid] = branch
        return branch

    def _parent(self, entries: Sequence[FailoverEntry], who: str) -> Branch:
        """The branch of the first entry. One that ended before it served any client is unknown, and holds nothing."""
        newest = entries[0]
        known = self.branches.get(newest.vbucket_uuid)
        if known is None:
            if len(entries) == 1:
                raise Violation(f"{who}: no copy was ever active under the uuid {newest.vbucket_uuid:x}")
            known = Branch(newest.vbucket_uuid, self._parent(entries[1:], who), newest.seqno)
            self.branches[newest.vbucket_uuid] = known
        return known

    def _adopt(self, copy: Vbucket, branch: Branch, parent: Branch, who: str) -> None:
        """The new branch starts with the shared state and whatever the copy holds of the snapshot it was in."""
        shared, held = parent.contents(branch.start), contents_of(copy, self.keys)
        beyond = sorted((found for found in held.values() if found.seqno > branch.start), key=lambda v: v.seqno)
        for found in beyond:
            if not parent.holds(found):
                raise Violation(f"{who}: became active with {found}, which was never written")
        expected = {**shared, **{found.key: found for found in beyond}}
        if live(expected) != live(held):
            raise Violation(
                f"{who}: became active at {copy.high_seqno}, branching at {branch.start}, "
                f"with {describe(held)} instead of {describe(expected)}"
            )
        branch.history = beyond
        branch.adopted_to = branch.high_seqno = copy.high_seqno

    def _check_nothing_lost(self, branch: Branch, who: str) -> None:
        assert branch.parent is not None
        for uuid, written in self.acknowledged:
            if self.given_up(uuid, written):  # a copy of what went on unaware was made owner again
                continue
            if self.survives(uuid, written, branch.parent) and not self.survives(uuid, written, branch):
                raise Violation(f"{who}: lost {written}, which was acknowledged when on disk")

    # Acknowledged writes.

    def survives(self, uuid: int, written: Version, newest: Branch) -> bool:
        """Does this write lie on the branches that led to ``newest``?"""
        limit = 2**64
        branch: Branch | None = newest
        while branch is not None:
            if branch.uuid == uuid:
                return written.seqno <= limit or written in newest.history
            if written in branch.history and written.seqno <= limit:
                return True
            limit = min(limit, branch.start)
            branch = branch.parent
        return False

    def given_up(self, uuid: int, written: Version) -> bool:
        """Was this write on a branch that a promotion left behind?"""
        seqno = written.seqno
        branch: Branch | None = self.branches[uuid]
        while branch is not None:
            if branch.given_up_beyond is not None and seqno > branch.given_up_beyond:
                return True
            seqno, branch = min(seqno, branch.start), branch.parent
        return False

    def check_acknowledged(self, owner: Vbucket) -> None:
        """Everything that was acknowledged is on the owner's branches, or was given up."""
        newest = self.branches[owner.failover_log.newest.vbucket_uuid]
        for uuid, written in self.acknowledged:
            if not self.given_up(uuid, written) and not self.survives(uuid, written, newest):
                raise Violation(f"vbucket {self.vbucket}: {written} was acknowledged when on disk, and is lost")

    def flushed(self, vbucket_uuid: int) -> None:
        """Everything written so far on this branch, and on those before it, was deleted on purpose."""
        branch: Branch | None = self.branches[vbucket_uuid]
        while branch is not None:
            branch.given_up_beyond, branch = 0, branch.parent

    # Claims.

    def contents(self, log: FailoverLog, seqno: int) -> Contents:
        """What a copy with this log holds that is consistent at ``seqno``."""
        branch = self.branches.get(log.newest.vbucket_uuid)
        if branch is None:
            raise Violation(f"no copy was ever active under the uuid {log.newest.vbucket_uuid:x}")
        while branch.parent is not None and seqno <= branch.start:
            branch = branch.parent
        if seqno < branch.adopted_to and branch.start != seqno:
            raise Violation(f"no copy under {branch.uuid:x} was ever consistent at {seqno}")
        return branch.contents(seqno)


def check_same(held: Contents, expected: Contents, who: str, forgotten_to: int = 0, unheard_to: int = 0) -> None:
    """Live keys are equal in everything; tombstones too, unless purged there or never heard of here."""
    problems = []
    for key in sorted({*held, *expected}):
        ours, theirs = held.get(key), expected.get(key)
        if ours == theirs:
            continue
        if ours is None and theirs is not None and not theirs.live and theirs.seqno <= unheard_to:
            continue
        if theirs is None and ours is not None and not ours.live and ours.seqno <= forgotten_to:
            continue
        problems.append(
            f"{key.decode()}: holds {ours}, not {theirs}" if str(ours) != str(theirs) else f"{ours!r} is not {theirs!r}"
        )
    if problems:
        raise Violation(f"{who}: " + "; ".join(problems))


__all__ = [
    "PREFIX",
    "Branch",
    "Contents",
    "Truth",
    "Version",
    "Violation",
    "check_same",
    "contents_of",
    "describe",
    "live",
    "version",
    "without",
]
