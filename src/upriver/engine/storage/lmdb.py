"""Storage on LMDB: crash-safe without a recovery step, and nothing to configure.

Theory of operation. Four tables in one LMDB file: facts, descriptions, groups (by number), blocks (by vbucket and last
seqno). LMDB never overwrites a page that the last commit can see, so a crash at any instant leaves that commit. Every
value has a checksum of itself and of its key, which is verified on every read; the pages in between are checked before
LMDB trusts them. Every commit stores its transaction number in the main tree, for that check.

The map is reserved large and sparse, because a full map would lose a transaction; a full disk is then an ordinary write
error that ends the transaction and leaves the store as it was. Never WRITEMAP (a full disk would be a SIGBUS), never
NOSYNC. Read transactions are short, because a long one keeps LMDB from reusing pages. Only the flusher writes. If a
meta page cannot be written, LMDB disables its environment; the file is then reopened at a moment without readers.

Our directories hold ``upriver.lock``: its lock keeps a second process out, and its presence tells a damaged store from
the files of another program. It is signed with the name of the store once that is on disk, and never before. So a
signed file without a store means that the store was lost. A file without a signature means that a store was about to
begin, or that only older versions have written it.
"""

import fcntl
import json
import logging
import os
import secrets
import shutil
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import lmdb
from isal.isal_zlib import crc32  # the CRC-32 of zlib, three times as fast

from upriver.engine.storage.interface import Block, Storage, WriteBatch
from upriver.engine.storage.lmdb_check import (
    COMMIT_KEY,
    COMMIT_NUMBER,
    Contents,
    Damaged,
    Unfinished,
    check_file,
    complete,
)
from upriver.errors import CorruptData, DataInUse, ForeignData, NewerFormat, StorageError
from upriver.files import sync
from upriver.model import PREFIX, SEQNO_OFFSET, aligned, size_at

log = logging.getLogger(__name__)

FORMAT: Final = 4
MAP_BYTES: Final = 2**40
LOCK_FILE: Final = "upriver.lock"
DATA_FILE: Final = "data.mdb"
#: The folder for an unfinished compact copy.
COMPACTING: Final = "compacting"
#: This much memory is kept for the next group or block.
SEAL_BYTES_MAX: Final = 8 * 2**20

#: Checksums of a value and of its key; older formats have 0 for the key.
_CHECKSUM: Final = struct.Struct("<II")
_BLOCK_KEY: Final = struct.Struct(">HQ")
_NUMBER: Final = struct.Struct(">Q")
_VBUCKET: Final = struct.Struct(">H")
_BUCKET: Final = b"bucket"
_META_BYTES_MIN: Final = 2 * 4096
_TABLES: Final = (b"facts", b"descriptions", b"groups", b"blocks")
#: Up to this format facts and descriptions had no checksum.
_BARE_FORMAT: Final = 2
#: From this format on every commit stores its number.
_NUMBERED_FORMAT: Final = 4
_ADVICE: Final = "restore the directory from a backup"
_SIGNATURE: Final = b"upriver store "
_SIGNATURE_BYTES_MAX: Final = 256
#: The errors that LMDB raises for damaged pages.
_DAMAGE: Final = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.InvalidError,
    lmdb.IncompatibleError,
    lmdb.BadTxnError,
    lmdb.BadValsizeError,
    lmdb.CursorFullError,
    lmdb.PageFullError,
    lmdb.VersionMismatchError,
)


class LmdbStorage(Storage):
    """One data directory, held until ``close``."""

    keeps_records = True

    def __init__(self, path: str | os.PathLike[str], *, map_bytes: int = MAP_BYTES) -> None:
        self.path = os.fspath(path)
        self._map_bytes = map_bytes
        #: The number of readers. Reopening the file holds the lock, so that no reader begins meanwhile.
        self._readers = 0
        self._readers_lock = threading.Lock()
        self._disabled = False
        self._closed = False
        #: The buffer in which groups and blocks get their checksum. New memory for each took longer than writing it.
        self._seal = bytearray()
        self._lock = self._occupy()
        try:
            self._signed = os.pread(self._lock, _SIGNATURE_BYTES_MAX, 0)
            self._env = self._open()
            self._facts = self._check_format()
        except BaseException:
            os.close(self._lock)
            raise

    def facts(self) -> dict[str, Any]:
        return dict(self._facts)

    def descriptions(self) -> dict[int, dict[str, Any]]:
        with self._reading(), self._env.begin(db=self._descriptions) as txn:
            found = {}
            for key, value in txn.cursor():
                (vbucket,) = _VBUCKET.unpack(key)
                found[vbucket] = self._unsealed(key, value, f"the description of vbucket {vbucket}")
            return found

    def blocks(self, vbucket: int, after: int = 0, max_bytes: int = 2**63) -> list[Block]:
        found: list[Block] = []
        with self._reading(), self._env.begin(db=self._blocks, buffers=True) as txn:
            cursor = txn.cursor()
            more = cursor.set_range(_BLOCK_KEY.pack(vbucket, after + 1))
            while more and max_bytes > 0:
                owner, upto = _BLOCK_KEY.unpack(cursor.key())
                if owner != vbucket:
                    break
                value = cursor.value()
                found.append(
                    Block(vbucket, upto, bytes(self._checked(cursor.key(), value, _block_name(vbucket, upto))))
                )
                max_bytes -= len(value)
                more = cursor.next()
        return found

    def all_blocks(self) -> Iterator[tuple[int, memoryview]]:
        with self._reading(), self._env.begin(db=self._blocks, buffers=True) as txn:
            for key, value in txn.cursor():
                vbucket, upto = _BLOCK_KEY.unpack(key)
                yield vbucket, self._checked(key, value, _block_name(vbucket, upto))

    def groups(self) -> Iterator[tuple[int, memoryview]]:
        with self._reading(), self._env.begin(db=self._groups, buffers=True) as txn:
            for key, value in txn.cursor():
                (number,) = _NUMBER.unpack(key)
                yield number, self._checked(key, value, f"group {number}")

    def commit(self, batch: WriteBatch) -> None:
        self._check_open()
        try:
            self._reopen_if_disabled()
            self._env.reader_check()  # a process killed during a backup would keep pages from being reused
            with self._env.begin(write=True) as txn:
                self._write(txn, batch)
                _number(txn, self._main)
        except (lmdb.Error, OSError) as error:
            self._check_environment()
            raise StorageError(self.path, f"cannot write: {error}") from error
        self._facts.update(batch.facts)
        self._sign()

    def backup(self, path: str) -> None:
        self._check_open()
        target = Path(path)
        try:
            target.mkdir(parents=True, exist_ok=True)
            if _entries(target):
                raise StorageError(path, "the target directory is not empty")
            with self._held():
                self._env.copy(path, compact=True)
            self._mark_as_copy(path)
            sync(target / DATA_FILE)
            (target / LOCK_FILE).write_bytes(self._signature())
            sync(target / LOCK_FILE)
            sync(target)
        except (lmdb.Error, OSError) as error:
            raise StorageError(path, f"cannot write the backup: {error}") from error

    def _mark_as_copy(self, path: str) -> None:
        """Mark the backup, so that it opens as another store than the original."""
        with lmdb.open(path, map_size=self._map_bytes, max_dbs=8, lock=False) as env:
            meta = env.open_db(b"facts")
            with env.begin(write=True, db=meta) as txn:
                stored = txn.get(_BUCKET)
                facts = {"format": FORMAT} if stored is None else self._known_facts(stored)
                txn.put(_BUCKET, _sealed(b"", json.dumps({**facts, "clean": False, "copy": True}).encode()))
        number_commits(path, self._map_bytes)

    def size_bytes(self) -> int:
        return os.stat(os.path.join(self.path, DATA_FILE)).st_blocks * 512

    def blocks_bytes(self) -> int:
        with self._reading(), self._env.begin() as txn:
            tree = txn.stat(self._blocks)
        return int(tree["psize"] * (tree["branch_pages"] + tree["leaf_pages"] + tree["overflow_pages"]))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._env.close()
            os.close(self._lock)

    def _check_open(self) -> None:
        """After closing, another process may use the directory: do not write or reopen it."""
        if self._closed:
            raise StorageError(self.path, "is closed")

    # Opening.

    def _occupy(self) -> int:
        directory = Path(self.path)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            entries = _entries(directory)
            if entries and LOCK_FILE not in entries:
                raise ForeignData(self.path, "the directory holds files of another program")
            lock = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StorageError(self.path, f"cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise DataInUse(self.path, "another process uses the directory") from None
        shutil.rmtree(directory / COMPACTING, ignore_errors=True)
        return lock

    def _open(self) -> lmdb.Environment:
        data = Path(self.path, DATA_FILE)
        size = data.stat().st_size if data.exists() else 0
        if not size:
            self._check_unsigned(f"{DATA_FILE} is {'empty' if data.exists() else 'missing'}")
        elif size < _META_BYTES_MIN:
            raise CorruptData(self.path, f"{DATA_FILE} is truncated: {_ADVICE}")
        try:
            contents = self._checked_file(data) if size else None
            self._complete = contents is not None and contents.tables.issuperset(_TABLES)
            self._numbered = contents is not None and contents.number is not None
            return self._open_environment()
        except (Damaged, *_DAMAGE) as error:
            raise CorruptData(self.path, f"{DATA_FILE} cannot be read: {error}: {_ADVICE}") from None
        except (lmdb.Error, OSError) as error:
            raise StorageError(self.path, f"cannot be opened: {error}") from error

    def _checked_file(self, data: Path) -> Contents:
        try:
            contents = check_file(data)
        except Unfinished as error:
            complete(data, error.commit)
            log.warning("%s: %s; it is completed now", self.path, error)
            contents = check_file(data)
        unknown = contents.tables.difference(_TABLES)
        if unknown and not contents.tables.intersection(_TABLES):
            raise ForeignData(self.path, f"{DATA_FILE} belongs to another program")
        if unknown:  # LMDB would start an empty table in place of the one with a damaged name
            raise Damaged(f"there is an unknown table {min(unknown).decode(errors='replace')!r}")
        return contents

    def _open_environment(self) -> lmdb.Environment:
        env = lmdb.open(self.path, map_size=self._map_bytes, max_dbs=8, readahead=True, meminit=False)
        try:
            self._main = env.open_db(None)
            if self._complete:
                tables = [env.open_db(name, create=False) for name in _TABLES]
            else:
                with env.begin(write=True) as txn:
                    tables = [env.open_db(name, txn=txn) for name in _TABLES]
                    _number(txn, self._main)
                self._complete = True
            self._meta, self._descriptions, self._groups, self._blocks = tables
        except BaseException:
            env.close()
            raise
        return env

    def _check_format(self) -> dict[str, Any]:
        try:
            with self._reading(), self._env.begin(db=self._meta) as txn:
                stored = txn.get(_BUCKET)
                entries = [txn.stat(table)["entries"] for table in (self._meta, self._descriptions, self._blocks)]
            if stored is None:
                self._check_unsigned(f"{DATA_FILE} holds no store")
                if any(entries):
                    raise self._damaged("the facts about the bucket")
                return {}
            facts = self._known_facts(stored)
            if facts["format"] >= _NUMBERED_FORMAT and not self._numbered:
                raise self._damaged("the number of the last commit")
            while facts["format"] < FORMAT:
                facts = self._upgrade(facts)
        except BaseException:
            self._env.close()
            raise
        return facts

    def _known_facts(self, stored: bytes) -> dict[str, Any]:
        """The facts, if this version knows their format."""
        what = "the facts about the bucket"
        bare = stored[4 : _CHECKSUM.size].strip(b"\0") != b""  # JSON has no zeroes, a checksum ends with them
        facts = self._json(stored, what) if bare else self._unsealed(b"", stored, what)
        found = facts.get("format")
        if not isinstance(found, int) or found < 1 or (bare and found > _BARE_FORMAT):
            raise self._damaged(what)
        if found > FORMAT:
            raise NewerFormat(
                self.path, f"has format {found}, but this version knows only {FORMAT}: use the version that wrote it"
            )
        return facts

    def _upgrade(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Upgrade by one format, in one transaction."""
        facts = {**facts, "format": facts["format"] + 1}
        try:
            with self._reading(), self._env.begin(write=True) as txn:
                if facts["format"] == 2:
                    # Each store has a name, which tells a copy from its original.
                    facts["store"] = secrets.token_hex(8)
                if facts["format"] == 3:
                    # Descriptions and facts carry a checksum, and descriptions may have cuts.
                    for key, value in list(txn.cursor(db=self._descriptions)):
                        self._json(value, f"the description of vbucket {key.hex()}")
                        txn.put(key, _sealed(key, value), db=self._descriptions)
                if facts["format"] >= _NUMBERED_FORMAT:
                    _number(txn, self._main)
                text = json.dumps(facts).encode()
                txn.put(_BUCKET, text if facts["format"] <= _BARE_FORMAT else _sealed(b"", text), db=self._meta)
        except OSError as error:
            raise StorageError(self.path, f"cannot be upgraded: {error}") from error
        return facts

    # The name in the lock file.

    def _signature(self) -> bytes:
        """The content of the lock file; empty while there is no store."""
        name = self._facts.get("store")
        return b"%b%b\n" % (_SIGNATURE, name.encode()) if name else b""

    def _sign(self) -> None:
        """Sign the lock file after a successful commit; from then on the store must exist."""
        signature = self._signature()
        if signature in (b"", self._signed):
            return
        with suppress(OSError):  # the next commit tries again
            sync(Path(self.path))
            os.pwrite(self._lock, signature, 0)
            os.ftruncate(self._lock, len(signature))
            os.fsync(self._lock)
            self._signed = signature

    def _check_unsigned(self, why: str) -> None:
        """There is no store: raise if there was one."""
        if self._signed:
            name = self._signed.removeprefix(_SIGNATURE).strip().decode(errors="replace")
            lost = f"{why}, but {LOCK_FILE} says that store {name} was here"
            raise CorruptData(self.path, f"{lost}: {_ADVICE}, or empty it to begin a new store")

    # Recovering from a disabled environment.

    def _check_environment(self) -> None:
        """After a failed write, find out whether LMDB has disabled its environment, for reading and writing."""
        try:
            with self._env.begin():
                pass
        except lmdb.Error:
            self._disabled = True
        with suppress(lmdb.Error, OSError, StorageError):  # otherwise the next write tries
            self._reopen_if_disabled()

    def _reopen_if_disabled(self) -> None:
        """Reopen the file if the environment is disabled; it then shows the last complete commit."""
        if not self._disabled:
            return
        with self._readers_lock:
            if self._readers:  # closing would take the memory that they read from
                raise StorageError(self.path, "cannot be reopened while it is read; the next write tries again")
            self._env.close()
            self._env = self._open_environment()
            self._disabled = False
        log.warning("%s: reopened after a failed write", self.path)

    # Writing.

    def _sealed_in_place(self, key: bytes, value: bytes | memoryview) -> bytes | memoryview:
        """The value after its checksum, in memory that the next call reuses."""
        size = _CHECKSUM.size + len(value)
        if size > SEAL_BYTES_MAX:
            return _sealed(key, value)
        if size > len(self._seal):
            self._seal = bytearray(size)
        sealed = memoryview(self._seal)[:size]
        _CHECKSUM.pack_into(sealed, 0, crc32(value), crc32(key))
        sealed[_CHECKSUM.size :] = value
        return sealed

    def _write(self, txn: lmdb.Transaction, batch: WriteBatch) -> None:
        for vbucket, seqno in batch.trims.items():
            self._trim(txn, vbucket, seqno)
        for vbucket, upto in batch.removed:
            txn.delete(_BLOCK_KEY.pack(vbucket, upto), db=self._blocks)
        for block in batch.blocks:
            key = _BLOCK_KEY.pack(block.vbucket, block.upto)
            txn.put(key, self._sealed_in_place(key, block.records), db=self._blocks)
        if batch.group is not None:
            number = batch.group[0]
            key = _NUMBER.pack(number)
            sealed = self._sealed_in_place(key, batch.group[1])
            batch.group = (number, b"")  # release the content: LMDB makes another copy, and two are enough
            if not txn.put(key, sealed, db=self._groups, append=True):  # not the last number: store it anyway
                txn.put(key, sealed, db=self._groups)
        if batch.drop_groups_to:
            cursor = txn.cursor(db=self._groups)
            while cursor.first() and _NUMBER.unpack(cursor.key())[0] <= batch.drop_groups_to:
                cursor.delete()
        for vbucket, description in batch.descriptions.items():
            key = _VBUCKET.pack(vbucket)
            if description is None:
                txn.delete(key, db=self._descriptions)
            else:
                txn.put(key, _sealed(key, json.dumps(description).encode()), db=self._descriptions)
        if batch.facts:
            facts = {**self._facts, **batch.facts, "format": FORMAT}
            txn.put(_BUCKET, _sealed(b"", json.dumps(facts).encode()), db=self._meta)

    def _trim(self, txn: lmdb.Transaction, vbucket: int, seqno: int) -> None:
        cursor = txn.cursor(db=self._blocks)
        if not cursor.set_range(_BLOCK_KEY.pack(vbucket, seqno + 1)):
            return
        straddling: bytes | None = None
        owner, upto = _BLOCK_KEY.unpack(cursor.key())
        cut_key = _BLOCK_KEY.pack(vbucket, seqno)
        if seqno and owner == vbucket:  # only the first can straddle
            straddling = self._cut_block(cut_key, cursor, seqno, _block_name(vbucket, upto))
        while (key := cursor.key()) and _BLOCK_KEY.unpack(key)[0] == vbucket:
            if not cursor.delete():
                break
        if straddling is not None:
            txn.put(cut_key, straddling, db=self._blocks)

    def _cut_block(self, cut_key: bytes, cursor: lmdb.Cursor, seqno: int, name: str) -> bytes | None:
        """The value that replaces a block that is cut at ``seqno``; None for nothing.

        A damaged block stays as it is, without a new checksum, so that every reader notices. Only its own vbucket is
        affected, while a refused cut would stop all writes.
        """
        value = bytes(cursor.value())
        try:
            records = cut(bytes(self._checked(cursor.key(), memoryview(value), name)), seqno)
        except CorruptData as error:
            log.error("%s: a damaged block below %d is kept: %s", self.path, seqno, error.why)
            return value
        return _sealed(cut_key, records) if records else None

    # Reading.

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Keep the environment open meanwhile."""
        with self._readers_lock:
            self._readers += 1
        try:
            yield
        finally:
            with self._readers_lock:
                self._readers -= 1

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Translate the errors of LMDB on reading."""
        try:
            with self._held():
                yield
        except (*_DAMAGE, struct.error) as error:
            raise CorruptData(self.path, f"{DATA_FILE} cannot be read: {error}: {_ADVICE}") from error
        except lmdb.Error as error:
            raise StorageError(self.path, f"cannot read: {error}") from error

    def _checked(self, key: bytes | memoryview, value: memoryview, what: str) -> memoryview:
        records = value[_CHECKSUM.size :]
        if len(value) < _CHECKSUM.size:
            raise self._damaged(what)
        own, of_key = _CHECKSUM.unpack_from(value)
        if own != crc32(records) or of_key not in (0, crc32(key)):
            raise self._damaged(what)
        return records

    def _unsealed(self, key: bytes, value: bytes, what: str) -> dict[str, Any]:
        return self._json(bytes(self._checked(key, memoryview(value), what)), what)

    def _json(self, value: bytes, what: str) -> dict[str, Any]:
        try:
            found = json.loads(value)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise self._damaged(what)
        return found

    def _damaged(self, what: str) -> CorruptData:
        return CorruptData(self.path, f"{what} is damaged: {_ADVICE}")


def _entries(directory: Path) -> set[str]:
    """The entries of a directory, without lost+found and the like."""
    return {entry.name for entry in directory.iterdir()} - {"lost+found"}


def _block_name(vbucket: int, upto: int) -> str:
    return f"the block of vbucket {vbucket} up to {upto}"


def _number(txn: lmdb.Transaction, main: Any) -> None:
    """Store the number of the commit in its main tree; its page is written with every commit anyway."""
    txn.put(COMMIT_KEY, COMMIT_NUMBER.pack(txn.id()), db=main)


def number_commits(path: str, map_bytes: int) -> None:
    """Store numbers in a compact copy: transactions start again at 1 there, and either meta page needs a commit."""
    with lmdb.open(path, map_size=map_bytes, max_dbs=8, lock=False) as env:
        for _ in range(2):
            with env.begin(write=True) as txn:
                _number(txn, env.open_db(None, txn=txn))


def _sealed(key: bytes, value: bytes | memoryview) -> bytes:
    return b"".join((_CHECKSUM.pack(crc32(value), crc32(key)), value))


def cut(records: bytes, seqno: int) -> bytes:
    """The records up to ``seqno``."""
    offset = 0
    while offset < len(records):
        (found,) = _NUMBER.unpack_from(records, offset + PREFIX.size + SEQNO_OFFSET)
        if found > seqno:
            break
        offset += aligned(size_at(records, offset))
    return records[:offset]
