"""Files of sorted entries: a header, 16 bytes per entry, to be mapped into memory, and a description.

The header has the version of the hash, the table's seed, the number of entries and checksums of itself and of the rest.
A file that is missing, short, damaged, or of another version or seed counts as absent. The checksum of the entries is
compared once per process and file; the header always.
"""

import os
import struct
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from isal import isal_zlib

from upriver.tables.keys.entries import ENTRY_BYTES, HASH_VERSION, SEED_BYTES, Entries, no_entries

#: Kind of file, version of the layout, version of the hash, length of the description, seed, number of entries,
#: checksum of all that follows the header; then the checksum of the header.
_HEADER: Final = struct.Struct("<8sHHI16sQI")
HEADER_BYTES: Final = 64
LAYOUT_VERSION: Final = 1
#: Number of files to remember as undamaged.
_VERIFIED_MAX: Final = 100_000
_verified: set[tuple[int, ...]] = set()


class StoredEntries(NamedTuple):
    """The content of a file."""

    seed: bytes
    entries: Entries
    description: bytes


class EntryWriter:
    """Writes a file of entries in pieces."""

    def __init__(self, path: Path, kind: bytes, seed: bytes) -> None:
        self._kind, self._seed = kind, seed
        self.count = 0
        self._checksum = 0
        self._file = open(path, "wb")  # noqa: SIM115 (closed by finish or close)
        self._file.write(bytes(HEADER_BYTES))

    def append(self, entries: Entries) -> None:
        """Append entries, which sort after all earlier ones."""
        if len(entries):
            data = np.ascontiguousarray(entries).data.cast("B")
            self._checksum = isal_zlib.crc32(data, self._checksum)
            self._file.write(data)
            self.count += len(entries)

    def finish(self, description: bytes = b"") -> None:
        """Write the description and the header, and close the file."""
        self._file.write(description)
        checksum = isal_zlib.crc32(description, self._checksum)
        head = _HEADER.pack(
            self._kind, LAYOUT_VERSION, HASH_VERSION, len(description), self._seed, self.count, checksum
        )
        self._file.seek(0)
        self._file.write(_sealed(head))
        self._file.close()

    def close(self) -> None:
        """Close the file, finished or not."""
        self._file.close()


def open_entries(path: Path, kind: bytes, seed: bytes | None = None) -> StoredEntries | None:
    """The entries of a file, mapped into memory; None if they must be built again. Any seed is right without one."""
    try:
        with open(path, "rb") as file:
            head = file.read(HEADER_BYTES)
            stat = os.fstat(file.fileno())
            if len(head) < HEADER_BYTES or _sealed(head[: _HEADER.size]) != head:
                return None
            magic, layout, hash_version, length, stored, count, checksum = _HEADER.unpack_from(head)
            if (magic, layout, hash_version) != (kind, LAYOUT_VERSION, HASH_VERSION) or seed not in (None, stored):
                return None
            end = HEADER_BYTES + count * ENTRY_BYTES
            if stat.st_size != end + length:
                return None
            identity = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, checksum)
            if identity not in _verified and not _is_intact(file.fileno(), stat.st_size, checksum):
                return None
            _remember(identity)
            entries = np.memmap(file, np.uint64, "r", HEADER_BYTES, (count, 2)) if count else no_entries()
            return StoredEntries(stored, entries, os.pread(file.fileno(), length, end) if length else b"")
    except FileNotFoundError:
        return None


def _sealed(head: bytes) -> bytes:
    """A header with its checksum."""
    return (head + struct.pack("<I", isal_zlib.crc32(head))).ljust(HEADER_BYTES, b"\0")


def _is_intact(descriptor: int, size: int, checksum: int) -> bool:
    found, at = 0, HEADER_BYTES
    while at < size and (data := os.pread(descriptor, 1 << 20, at)):
        found = isal_zlib.crc32(data, found)
        at += len(data)
    return found == checksum


def _remember(identity: tuple[int, ...]) -> None:
    if len(_verified) >= _VERIFIED_MAX:
        _verified.clear()
    _verified.add(identity)


assert _HEADER.size + 4 <= HEADER_BYTES
assert struct.calcsize("16s") == SEED_BYTES
