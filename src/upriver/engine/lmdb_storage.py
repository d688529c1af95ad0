"""Storage on LMDB: crash-safe without a recovery step, and nothing to configure.

Theory of operation. Four tables in one LMDB file: facts, descriptions, groups (by number), blocks (by
vbucket and the seqno that they reach). LMDB never overwrites a page that the last commit
can see, so a stop at any instant leaves that commit. Each group and block carries a checksum, which is
verified whenever it is read.

The map is reserved large and sparse, because a full map would lose a transaction; a full disk then is an
ordinary write error that ends the transaction and leaves the store as it was. Never WRITEMAP (a full disk
would be a SIGBUS), never NOSYNC. Read transactions are short, because a long one keeps LMDB from reusing
pages. Only the flusher writes.

A directory of ours holds ``upriver.lock``, whose lock keeps a second process out and whose presence tells a
damaged store from somebody else's files.
"""

import fcntl
import json
import os
import secrets
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import lmdb

from upriver.engine.storage import Batch, Block, Storage
from upriver.errors import CorruptData, DataInUse, ForeignData, NewerFormat, StorageError
from upriver.model.record import PREFIX, SEQNO_OFFSET, aligned, size_at

FORMAT: Final = 2
MAP_BYTES: Final = 2**40
LOCK_FILE: Final = "upriver.lock"
DATA_FILE: Final = "data.mdb"

_CHECKSUM: Final = struct.Struct("<I4x")
_BLOCK_KEY: Final = struct.Struct(">HQ")
_NUMBER: Final = struct.Struct(">Q")
_VBUCKET: Final = struct.Struct(">H")
_BUCKET: Final = b"bucket"
_META_BYTES_MIN: Final = 2 * 4096
_TABLES: Final = 4
#: What LMDB raises on reading pages that are not what they should be.
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
        self._lock = self._occupy()
        try:
            self._env = self._open()
            self._facts = self._check_format()
        except BaseException:
            os.close(self._lock)
            raise

    def facts(self) -> dict[str, Any]:
        return dict(self._facts)

    def descriptions(self) -> dict[int, dict[str, Any]]:
        with self._reading(), self._env.begin(db=self._descriptions) as txn:
            return {
                _VBUCKET.unpack(key)[0]: self._json(value, f"description of vbucket {key.hex()}")
                for key, value in txn.cursor()
            }

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
                found.append(Block(vbucket, upto, bytes(self._checked(value, _block_name(vbucket, upto)))))
                max_bytes -= len(value)
                more = cursor.next()
        return found

    def all_blocks(self) -> Iterator[tuple[int, memoryview]]:
        with self._reading(), self._env.begin(db=self._blocks, buffers=True) as txn:
            for key, value in txn.cursor():
                vbucket, upto = _BLOCK_KEY.unpack(key)
                yield vbucket, self._checked(value, _block_name(vbucket, upto))

    def groups(self) -> Iterator[tuple[int, memoryview]]:
        with self._reading(), self._env.begin(db=self._groups, buffers=True) as txn:
            for key, value in txn.cursor():
                (number,) = _NUMBER.unpack(key)
                yield number, self._checked(value, f"group {number}")

    def commit(self, batch: Batch) -> None:
        try:
            with self._env.begin(write=True) as txn:
                self._write(txn, batch)
        except (lmdb.Error, OSError) as error:
            raise StorageError(self.path, f"cannot write: {error}") from error
        self._facts.update(batch.facts)

    def backup(self, path: str) -> None:
        target = Path(path)
        target.mkdir(parents=True, exist_ok=True)
        if any(target.iterdir()):
            raise StorageError(path, "a backup goes to an empty directory")
        try:
            self._env.copy(path, compact=True)
            (target / LOCK_FILE).touch()
            _sync(target / DATA_FILE)
            _sync(target)
        except (lmdb.Error, OSError) as error:
            raise StorageError(path, f"cannot write the backup: {error}") from error

    def size_bytes(self) -> int:
        return os.stat(os.path.join(self.path, DATA_FILE)).st_blocks * 512

    def close(self) -> None:
        self._env.close()
        os.close(self._lock)

    # Opening.

    def _occupy(self) -> int:
        directory = Path(self.path)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            entries = {entry.name for entry in directory.iterdir()}
            if entries and LOCK_FILE not in entries:
                raise ForeignData(self.path, "the directory holds files that are not ours")
            lock = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StorageError(self.path, f"cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise DataInUse(self.path, "another process uses the directory") from None
        return lock

    def _open(self) -> lmdb.Environment:
        data = Path(self.path, DATA_FILE)
        if data.exists() and 0 < data.stat().st_size < _META_BYTES_MIN:
            raise CorruptData(self.path, f"{DATA_FILE} is cut off")
        try:
            env = lmdb.open(self.path, map_size=self._map_bytes, max_dbs=8, readahead=True, meminit=False)
        except (lmdb.InvalidError, lmdb.CorruptedError, lmdb.VersionMismatchError) as error:
            raise CorruptData(self.path, f"{DATA_FILE} cannot be read: {error}") from None
        except lmdb.Error as error:
            raise StorageError(self.path, f"cannot be opened: {error}") from error
        try:
            pages, page = env.info()["last_pgno"] + 1, env.stat()["psize"]
            if data.stat().st_size < pages * page and pages > 2:
                raise CorruptData(self.path, f"{DATA_FILE} is cut off")
            self._meta = env.open_db(b"facts")
            self._descriptions = env.open_db(b"descriptions")
            self._groups = env.open_db(b"groups")
            self._blocks = env.open_db(b"blocks")
        except lmdb.Error as error:
            env.close()
            raise CorruptData(self.path, f"{DATA_FILE} cannot be read: {error}") from None
        except BaseException:
            env.close()
            raise
        return env

    def _check_format(self) -> dict[str, Any]:
        try:
            with self._reading(), self._env.begin(db=self._meta) as txn:
                stored = txn.get(_BUCKET)
            if stored is None:
                if self._env.stat()["entries"] > _TABLES:
                    raise ForeignData(self.path, f"{DATA_FILE} belongs to somebody else")
                return {}
            facts = self._json(stored, "the facts about the bucket")
            if facts.get("format", 0) > FORMAT:
                raise NewerFormat(self.path, f"written in format {facts['format']}, this version knows {FORMAT}")
            while facts["format"] < FORMAT:
                facts = self._upgrade(facts)
        except BaseException:
            self._env.close()
            raise
        return facts

    def _upgrade(self, facts: dict[str, Any]) -> dict[str, Any]:
        """One format further, in one transaction."""
        facts = {**facts, "format": facts["format"] + 1}
        with self._env.begin(write=True) as txn:
            UPGRADES[facts["format"]](txn, facts)
            txn.put(_BUCKET, json.dumps(facts).encode(), db=self._meta)
        return facts

    # Writing.

    def _write(self, txn: lmdb.Transaction, batch: Batch) -> None:
        for vbucket, seqno in batch.trims.items():
            self._trim(txn, vbucket, seqno)
        for vbucket, upto in batch.removed:
            txn.delete(_BLOCK_KEY.pack(vbucket, upto), db=self._blocks)
        for block in batch.blocks:
            txn.put(_BLOCK_KEY.pack(block.vbucket, block.upto), _sealed(block.records), db=self._blocks)
        if batch.group is not None:
            number, group = batch.group
            txn.put(_NUMBER.pack(number), _sealed(group), db=self._groups, append=True)
        if batch.drop_groups_to:
            cursor = txn.cursor(db=self._groups)
            while cursor.first() and _NUMBER.unpack(cursor.key())[0] <= batch.drop_groups_to:
                cursor.delete()
        for vbucket, description in batch.descriptions.items():
            key = _VBUCKET.pack(vbucket)
            if description is None:
                txn.delete(key, db=self._descriptions)
            else:
                txn.put(key, json.dumps(description).encode(), db=self._descriptions)
        if batch.facts:
            facts = {**self._facts, **batch.facts, "format": FORMAT}
            txn.put(_BUCKET, json.dumps(facts).encode(), db=self._meta)

    def _trim(self, txn: lmdb.Transaction, vbucket: int, seqno: int) -> None:
        cursor = txn.cursor(db=self._blocks)
        if not cursor.set_range(_BLOCK_KEY.pack(vbucket, seqno + 1)):
            return
        straddling = b""
        owner, upto = _BLOCK_KEY.unpack(cursor.key())
        if seqno and owner == vbucket:  # only the first can straddle; damage must not get a fresh checksum
            straddling = cut(bytes(self._checked(memoryview(cursor.value()), _block_name(vbucket, upto))), seqno)
        while (key := cursor.key()) and _BLOCK_KEY.unpack(key)[0] == vbucket:
            if not cursor.delete():
                break
        if straddling:
            txn.put(_BLOCK_KEY.pack(vbucket, seqno), _sealed(straddling), db=self._blocks)

    # Reading.

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """What LMDB says about a read, in our words."""
        try:
            yield
        except (*_DAMAGE, struct.error) as error:
            raise CorruptData(self.path, f"{DATA_FILE} cannot be read: {error}") from error
        except lmdb.Error as error:
            raise StorageError(self.path, f"cannot read: {error}") from error

    def _checked(self, value: memoryview, what: str) -> memoryview:
        records = value[_CHECKSUM.size :]
        if len(value) < _CHECKSUM.size or _CHECKSUM.unpack_from(value)[0] != zlib.crc32(records):
            raise CorruptData(self.path, f"{what} is damaged")
        return records

    def _json(self, value: bytes, what: str) -> dict[str, Any]:
        try:
            found = json.loads(value)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise CorruptData(self.path, f"{what} is damaged")
        return found


#: What leads to each format from the one before: changes the facts, and the store if it must.
UPGRADES: Final[dict[int, Callable[[lmdb.Transaction, dict[str, Any]], None]]] = {
    # Format 2 gives each store a name of its own, by which statistics tell a restored copy from its original.
    2: lambda _, facts: facts.update(store=secrets.token_hex(8)),
}


def _block_name(vbucket: int, upto: int) -> str:
    return f"the block of vbucket {vbucket} up to {upto}"


def _sealed(records: bytes) -> bytes:
    return _CHECKSUM.pack(zlib.crc32(records)) + records


def cut(records: bytes, seqno: int) -> bytes:
    """The records up to ``seqno``."""
    offset = 0
    while offset < len(records):
        (found,) = _NUMBER.unpack_from(records, offset + PREFIX.size + SEQNO_OFFSET)
        if found > seqno:
            break
        offset += aligned(size_at(records, offset))
    return records[:offset]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
