"""The list of all keys that a task changed, with the vbuckets that it replaced.

It is stored next to the data files, so that old versions can be located again after a conflict, without the node. The
hashes of written rows are in the indexes of the task's data files already, so the list names these files; it has the
hashes of deleted keys itself. An index that was built again lists dead rows too, which may be of discarded changes:
therefore the list also has the dead rows of each file.
"""

import base64
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from pyroaring import BitMap

from upriver.errors import CorruptData
from upriver.tables.data_files.data_file import NewFile, positions_in
from upriver.tables.deletion_vectors import HIDDEN
from upriver.tables.key_index import HashKeys, KeyIndex, hash_keys
from upriver.tables.keys.entries import Entries, positions_of
from upriver.tables.keys.entry_file import EntryWriter, open_entries
from upriver.tables.storage import TableStorage

_KIND: Final = b"UPRIKEYS"


def key_list_path(attempt: str) -> str:
    """The name of an attempt's key list."""
    return f"{HIDDEN}/{attempt}.keys"


@dataclass(frozen=True, slots=True)
class KeyList:
    """The keys that a task changed."""

    seed: bytes
    #: Hashes of deleted keys, sorted; positions mean nothing.
    deleted: Entries
    #: The task's data files, with their dead rows.
    files: tuple[tuple[str, BitMap], ...]
    #: Vbuckets whose whole content was replaced.
    replaced: tuple[int, ...]

    @classmethod
    def open(cls, storage: TableStorage, path: str, cache: Path) -> "KeyList":
        """Read a key list. It cannot be built again, so a missing or damaged one is an error."""
        found = open_entries(storage.fetched(path, cache), _KIND)
        if found is None:
            raise CorruptData(f"{storage.url}/{path}", "the list of changed keys is missing or damaged")
        described = json.loads(found.description)
        files = tuple((name, BitMap.deserialize(base64.b85decode(dead))) for name, dead in described["files"])
        return cls(found.seed, found.entries, files, tuple(described["replaced"]))

    def hashes(self, storage: TableStorage, cache: Path, *, hashing: HashKeys = hash_keys) -> Iterator[Entries]:
        """The hashes of all changed keys, in sorted pieces; positions mean nothing."""
        yield self.deleted
        for path, dead in self.files:
            entries = KeyIndex.open(storage, path, self.seed, cache, hashing=hashing).entries
            if dead:
                entries = entries[~np.isin(positions_of(entries), positions_in(dead))]
            yield entries


class KeyListWriter:
    """Writes a key list."""

    def __init__(self, path: Path, seed: bytes) -> None:
        self._entries = EntryWriter(path, _KIND, seed)

    def append(self, deleted: Entries) -> None:
        """Append hashes of deleted keys, which sort after all earlier ones."""
        self._entries.append(deleted)

    def finish(self, files: Sequence[NewFile], replaced: Collection[int]) -> None:
        """Add the data files and the replaced vbuckets, and close the file."""
        described = {
            "files": [[file.path, base64.b85encode(bytes(file.dead_rows.serialize())).decode()] for file in files],
            "replaced": sorted(replaced),
        }
        self._entries.finish(json.dumps(described, separators=(",", ":")).encode())

    def close(self) -> None:
        """Close the file, finished or not."""
        self._entries.close()
