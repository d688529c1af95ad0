"""The result of a task that wrote a part of a table: small, and made of bytes, for the way to the driver."""

import json
import struct
from dataclasses import dataclass
from typing import Final

from upriver.tables.data_files.data_file import NewFile
from upriver.tables.documents import FieldReport

_LENGTH: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class PartResult:
    """The files of a part, and what the driver must know about it."""

    files: tuple[NewFile, ...]
    #: The path of the key list; empty if the part changes nothing.
    keys: str
    #: Vbuckets with changes, replaced ones included.
    vbuckets: tuple[int, ...]
    #: Vbuckets whose old rows are all dead.
    replaced: tuple[int, ...]
    report: FieldReport
    #: Number of rows that are not dead.
    live_rows: int
    #: Number of keys whose last change is a deletion.
    deleted_keys: int

    def to_bytes(self) -> bytes:
        """JSON, then the bitmaps of the files."""
        head = json.dumps(
            {
                "files": [[file.path, file.size, file.rows, file.stats, len(file.dead)] for file in self.files],
                "keys": self.keys,
                "vbuckets": self.vbuckets,
                "replaced": self.replaced,
                "report": self.report.as_bytes().decode(),
                "live_rows": self.live_rows,
                "deleted_keys": self.deleted_keys,
            },
            separators=(",", ":"),
        ).encode()
        return b"".join([_LENGTH.pack(len(head)), head, *(file.dead for file in self.files)])

    @classmethod
    def of_bytes(cls, data: bytes) -> "PartResult":
        """The result that ``to_bytes`` wrote."""
        (length,) = _LENGTH.unpack_from(data)
        at = _LENGTH.size + length
        found = json.loads(data[_LENGTH.size : at])
        files = []
        for path, size, rows, stats, dead in found["files"]:
            files.append(NewFile(path, size, rows, stats, bytes(data[at : at + dead])))
            at += dead
        return cls(
            tuple(files),
            found["keys"],
            tuple(found["vbuckets"]),
            tuple(found["replaced"]),
            FieldReport.of_bytes(found["report"].encode()),
            found["live_rows"],
            found["deleted_keys"],
        )
