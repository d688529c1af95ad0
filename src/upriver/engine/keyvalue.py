"""The key-value operations of a vbucket.

The table itself has the three most frequent operations; the others use ``find`` and ``store``. A write returns CAS and
seqno. Every operation first turns an expired item that it meets into an expiration, or leaves that for later if there
is no room, so clients never see expired items.
"""

import contextlib
import re
from collections import Counter
from typing import Final, NamedTuple

from upriver.engine.key_scan import KeyScan
from upriver.engine.table import StoredItem, Table, absolute
from upriver.errors import (
    InvalidArguments,
    KeyExists,
    KeyNotFound,
    Locked,
    NotANumber,
    NotLocked,
    NotMyVbucket,
    NotStored,
    OutOfMemory,
    TemporaryFailure,
    TooBig,
)
from upriver.model import INFLATED_BYTES_MAX, SNAPPY, TTL_MAX, Event, inflated_size, plain

LOCK_TIME_S: Final = 15
LOCK_TIME_S_MAX: Final = 30
#: The datatype bit for JSON.
JSON: Final = 0x01
_COUNTED: Final = re.compile(rb"[ \t-\r]*([+-]?)([0-9]+)(?=[ \t-\r\0]|\Z)")
_DIGITS_MAX: Final = 20


class Rank(NamedTuple):
    """Decides which of two versions of a key wins: the higher revision, then CAS, then expiry, then flags.

    Nodes that are written to at the same moment may give the same revision and CAS to different values. So the other
    fields decide too: otherwise each node would keep its own version for ever.
    """

    rev_seqno: int
    cas: int
    expiry: int = 0
    flags: int = 0
    deleted: bool = False
    datatype: int = 0
    value: bytes = b""

    @classmethod
    def of(cls, item: StoredItem) -> "Rank":
        """The rank of a stored version. The time of a deletion does not count, because not every node sends it."""
        if item.event != Event.MUTATION:
            return cls(item.rev_seqno, item.cas, deleted=True)
        return cls(item.rev_seqno, item.cas, item.expiry, item.flags, False, item.datatype, item.value)


def counted(value: bytes) -> int | None:
    """The number at the start of a value, as memcached reads it: with C's strtoull, up to a space or zero byte."""
    found = _COUNTED.match(value)
    if found is None:
        return None
    digits = found[2].lstrip(b"0")
    number = int(digits or b"0") if len(digits) <= _DIGITS_MAX else 2**64
    if number >= 2**64:
        return None
    if found[1] == b"-":
        number = -number % 2**64
        if number >= 2**63:
            return None
    return number


class KeyValue:
    """The operations of clients on the items of one vbucket."""

    def __init__(self, table: Table, operations: Counter[str]) -> None:
        self.table = table
        #: How often each of the rarer operations ran; the table's ledger counts the frequent ones.
        self.operations = operations
        self.scanned = KeyScan(table)
        self.get = table.get
        self.set = table.set
        self.delete = table.delete

    def add(self, key: bytes, value: bytes, flags: int = 0, expiry: int = 0, datatype: int = 0) -> tuple[int, int]:
        """Store the value if the key is not there."""
        if self._begin("add", key, value=False) is not None:
            raise KeyExists(vbucket=self.table.vbucket)
        return self.table.store(Event.MUTATION, key, value, flags, self.absolute(expiry), datatype)

    def replace(
        self, key: bytes, value: bytes, flags: int = 0, expiry: int = 0, cas: int = 0, datatype: int = 0
    ) -> tuple[int, int]:
        """Store the value if the key is there."""
        self._writable(key, self._present("replace", key, value=False), cas)
        return self._store(Event.MUTATION, key, value, flags, self.absolute(expiry), datatype)

    def append(self, key: bytes, value: bytes, cas: int = 0) -> tuple[int, int]:
        """Append bytes to the value."""
        return self._join("append", key, b"", value, cas)

    def prepend(self, key: bytes, value: bytes, cas: int = 0) -> tuple[int, int]:
        """Prepend bytes to the value."""
        return self._join("prepend", key, value, b"", cas)

    def increment(
        self, key: bytes, delta: int = 1, initial: int | None = None, expiry: int = 0, cas: int = 0
    ) -> tuple[int, int, int]:
        """Add to a 64-bit decimal number, which wraps around. Returns number, CAS and seqno."""
        return self._count("increment", key, 1, delta, initial, expiry, cas)

    def decrement(
        self, key: bytes, delta: int = 1, initial: int | None = None, expiry: int = 0, cas: int = 0
    ) -> tuple[int, int, int]:
        """Subtract from a decimal number, which stops at 0. Returns number, CAS and seqno."""
        return self._count("decrement", key, -1, delta, initial, expiry, cas)

    def touch(self, key: bytes, expiry: int) -> tuple[int, int, int]:
        """Give the item another expiry. Returns its flags, CAS and seqno."""
        item = self._present("touch", key)
        self._writable(key, item, 0)
        return item.flags, *self._again(key, item, self.absolute(expiry))

    def get_and_touch(self, key: bytes, expiry: int) -> StoredItem:
        """Read the item and give it another expiry."""
        item = self._present("get_and_touch", key)
        self._writable(key, item, 0)
        self._again(key, item, self.absolute(expiry))
        found = self.table.find(key)
        assert found is not None
        return found

    def get_and_lock(self, key: bytes, lock_time_s: int = LOCK_TIME_S) -> StoredItem:
        """Read the item and lock it for a while; only the returned CAS can change or unlock it."""
        item = self._present("get_and_lock", key)
        if self._lock(key) is not None:
            raise Locked(vbucket=self.table.vbucket)
        if not 0 < lock_time_s <= LOCK_TIME_S_MAX:
            lock_time_s = LOCK_TIME_S
        ledger = self.table.ledger
        item.cas = ledger.next_cas(ledger.clock())
        lock = item.cas, ledger.ticks() + lock_time_s
        if ledger.replicates_locks:
            self._publish_lock(key, item, item.cas, lock)
        else:
            self.table.lock(key, *lock)
        return item

    def unlock(self, key: bytes, cas: int) -> None:
        """Release a lock early."""
        replicates = self.table.ledger.replicates_locks
        item = self._present("unlock", key, value=replicates)
        lock = self._lock(key)
        if lock is None:
            raise NotLocked(vbucket=self.table.vbucket)
        if lock[0] != cas:
            raise Locked(vbucket=self.table.vbucket)
        if replicates:
            self._publish_lock(key, item, cas, None)
        else:
            del self.table.locks[key]

    def publish_locks(self) -> None:
        """Make each lock a change of its own, so that a successor gets them; a lock without room is left out."""
        for key, (cas, until) in list(self.table.locks.items()):
            if self._lock(key) is None:
                continue
            item = self.table.find(key)
            if item is not None and item.event == Event.MUTATION:
                with contextlib.suppress(TemporaryFailure, OutOfMemory):
                    self._publish_lock(key, item, cas, (cas, until))

    def _publish_lock(self, key: bytes, item: StoredItem, cas: int, lock: tuple[int, float] | None) -> None:
        """A change with the same value and revision, and the CAS and the time of a lock; None for an unlock."""
        self._store(
            Event.MUTATION, key, item.value, item.flags, item.expiry, item.datatype, cas, item.rev_seqno, lock=lock
        )

    def get_meta(self, key: bytes) -> StoredItem:
        """The newest version of the key, tombstones included, without its value."""
        self._check_active("get_meta")
        item = self.newest(key)
        if item is None:
            raise KeyNotFound(vbucket=self.table.vbucket)
        return item

    def set_with_meta(
        self,
        key: bytes,
        value: bytes,
        *,
        cas: int,
        rev_seqno: int,
        flags: int = 0,
        expiry: int = 0,
        datatype: int = 0,
        expected_cas: int = 0,
        force: bool = False,
        ttl: int = TTL_MAX,
    ) -> tuple[int, int]:
        """Store a version from another node, unless ours wins; ``expiry`` is absolute."""
        theirs = Rank(rev_seqno, cas, expiry, flags, False, datatype, value)
        self._resolve("set_with_meta", key, theirs, expected_cas, force)
        return self.table.store(Event.MUTATION, key, value, flags, expiry, datatype, cas, rev_seqno, 0, ttl)

    def delete_with_meta(
        self,
        key: bytes,
        *,
        cas: int,
        rev_seqno: int,
        expiry: int = 0,
        expected_cas: int = 0,
        force: bool = False,
        event: Event = Event.DELETION,
        ttl: int = TTL_MAX,
    ) -> tuple[int, int]:
        """Apply a deletion of another node, unless our version wins; ``expiry`` is the second of the deletion."""
        self._resolve("delete_with_meta", key, Rank(rev_seqno, cas, deleted=True), expected_cas, force)
        return self.table.store(event, key, b"", 0, expiry, 0, cas, rev_seqno, 0, ttl)

    def scan(self, start: bytes = b"", limit: int = 1000) -> list[bytes]:
        """Live keys from ``start`` on, in order."""
        if limit < 0:
            raise InvalidArguments(f"invalid limit {limit}: it must be at least 0", vbucket=self.table.vbucket)
        self._check_active("scan")
        return self.scanned.page(start, min(limit, 2**31))

    def random_key(self) -> bytes:
        """A random live key; all have the same chance."""
        self._check_active("random_key")
        key = self.table.random_key()
        if key is None:
            raise KeyNotFound(vbucket=self.table.vbucket)
        return key

    def newest(self, key: bytes) -> StoredItem | None:
        """The newest version of the key, tombstones included, without its value, in any role of the vbucket."""
        item, past = self._newest(key)
        return None if past else item

    def absolute(self, expiry: int) -> int:
        """Memcached's rule: up to 30 days an expiry counts from now, above that from the epoch."""
        return absolute(expiry, self.table.ledger.clock())

    def _check_active(self, operation: str) -> None:
        if not self.table.active:
            raise NotMyVbucket(vbucket=self.table.vbucket)
        self.operations[operation] += 1

    def _begin(self, operation: str, key: bytes, value: bool = True) -> StoredItem | None:
        """The live item, if there is one."""
        self._check_active(operation)
        if self.table.expire(key):
            return None
        item = self.table.find(key, value)
        return item if item is not None and item.event == Event.MUTATION else None

    def _newest(self, key: bytes) -> tuple[StoredItem | None, bool]:
        """The newest version without its value, and whether it has expired but there was no room to store that."""
        past = self.table.expire(key)
        item = self.table.find(key, value=False)
        return item, past and item is not None and item.event == Event.MUTATION

    def _present(self, operation: str, key: bytes, value: bool = True) -> StoredItem:
        item = self._begin(operation, key, value)
        if item is None:
            raise KeyNotFound(vbucket=self.table.vbucket)
        return item

    def _lock(self, key: bytes) -> tuple[int, float] | None:
        lock = self.table.locks.get(key)
        if lock is not None and lock[1] <= self.table.ledger.ticks():
            del self.table.locks[key]
            return None
        return lock

    def _writable(self, key: bytes, item: StoredItem, cas: int) -> None:
        """Check lock and CAS: the lock's owner may write, which unlocks; without a lock a given CAS must match."""
        lock = self._lock(key)
        if lock is not None:
            if lock[0] != cas:
                raise Locked(vbucket=self.table.vbucket)
        elif cas and item.cas != cas:
            raise KeyExists(vbucket=self.table.vbucket)

    def _store(
        self, event: int, key: bytes, value: bytes, *rest: int, lock: tuple[int, float] | None = None
    ) -> tuple[int, int]:
        """Store a version and replace the lock of the old one, if any, by ``lock``.

        The locks change first, because a waiting stream reads at once; they are restored if nothing is stored.
        """
        table = self.table
        high_seqno, before = table.high_seqno, table.locks.pop(key, None)
        if lock is not None:
            table.lock(key, *lock)
        try:
            return table.store(event, key, value, *rest)
        finally:
            if table.high_seqno == high_seqno:
                table.locks.pop(key, None)
                if before is not None:
                    table.locks[key] = before

    def _again(self, key: bytes, item: StoredItem, expiry: int) -> tuple[int, int]:
        return self._store(Event.MUTATION, key, item.value, item.flags, expiry, item.datatype)

    def _join(self, operation: str, key: bytes, before: bytes, behind: bytes, cas: int) -> tuple[int, int]:
        item = self._begin(operation, key)
        if item is None:
            raise NotStored(vbucket=self.table.vbucket)
        self._writable(key, item, cas)
        if item.datatype & SNAPPY and inflated_size(item.value) > INFLATED_BYTES_MAX:
            raise TooBig(vbucket=self.table.vbucket)
        value = before + plain(item.value, item.datatype) + behind
        # The joined value is not compressed, and its data type is not known to be JSON.
        return self._store(Event.MUTATION, key, value, item.flags, item.expiry, item.datatype & ~(SNAPPY | JSON))

    def _count(
        self, operation: str, key: bytes, sign: int, delta: int, initial: int | None, expiry: int, cas: int
    ) -> tuple[int, int, int]:
        if not 0 <= delta < 2**64 or not 0 <= (initial or 0) < 2**64:
            raise InvalidArguments("counter and step must be unsigned 64-bit numbers", vbucket=self.table.vbucket)
        item = self._begin(operation, key)
        if item is None:
            if initial is None:
                raise KeyNotFound(vbucket=self.table.vbucket)
            return initial, *self.table.store(Event.MUTATION, key, b"%d" % initial, expiry=self.absolute(expiry))
        value = plain(item.value, item.datatype)
        if value:  # memcached reports an empty value before it compares the CAS
            self._writable(key, item, cas)
        found = counted(value)
        if found is None:
            raise NotANumber(vbucket=self.table.vbucket)
        number = max(0, found + sign * delta) % 2**64
        # Memcached writes a shorter number over the old value and fills the rest with spaces.
        digits = (b"%d" % number).ljust(len(value))
        return number, *self._store(Event.MUTATION, key, digits, item.flags, item.expiry, item.datatype & ~SNAPPY)

    def _resolve(self, operation: str, key: bytes, theirs: "Rank", expected_cas: int, force: bool) -> None:
        """Conflict resolution: the version of the higher rank wins."""
        self._check_active(operation)
        ours, past = self._newest(key)
        if not theirs.rev_seqno or not theirs.cas:
            raise InvalidArguments("a version from another node needs a revision and a CAS", vbucket=self.table.vbucket)
        if past:
            raise TemporaryFailure(
                "no room to store the expiration that decides the conflict", vbucket=self.table.vbucket
            )
        if self._lock(key) is not None:
            raise Locked(vbucket=self.table.vbucket)
        if expected_cas and ours is None:
            raise KeyNotFound(vbucket=self.table.vbucket)
        if ours is None:
            return
        if expected_cas and ours.cas != expected_cas:
            raise KeyExists(vbucket=self.table.vbucket)
        if force:
            return
        if (ours.rev_seqno, ours.cas) == theirs[:2]:  # the value may have to decide
            ours = self.table.find(key)
            assert ours is not None
        if theirs <= Rank.of(ours):
            raise KeyExists("our version wins", vbucket=self.table.vbucket)
