"""The actions of a Delta log: dataclasses, and the JSON that the log stores.

A data file is identified by its path and the id of its deletion vector (``Add.file``). Fields that Upriver does not
know are kept in ``others``, so that an action that is repeated loses nothing.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Self
from urllib.parse import quote, unquote

#: The characters that paths in a log keep; others are percent-encoded.
_SAFE: Final = "/-_.~=+@!$&'()*,;:"


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class DeletionVector:
    """Where the bitmap of a file's deleted rows is (the descriptor)."""

    #: u: a file below the table's root, i: inline, p: an absolute path.
    storage_type: str
    path_or_inline: str
    size_bytes: int
    cardinality: int
    offset: int | None = None

    @property
    def id(self) -> str:
        """The id that tells two vectors of one file apart."""
        suffix = "" if self.offset is None else f"@{self.offset}"
        return f"{self.storage_type}{self.path_or_inline}{suffix}"

    def as_json(self) -> dict[str, Any]:
        """The descriptor as the log stores it."""
        found = {
            "storageType": self.storage_type,
            "pathOrInlineDv": self.path_or_inline,
            "offset": self.offset,
            "sizeInBytes": self.size_bytes,
            "cardinality": self.cardinality,
        }
        return {name: value for name, value in found.items() if value is not None}

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> "DeletionVector":
        """The descriptor in a log."""
        return cls(
            found["storageType"],
            found["pathOrInlineDv"],
            int(found["sizeInBytes"]),
            int(found["cardinality"]),
            None if found.get("offset") is None else int(found["offset"]),
        )


@dataclass(frozen=True, slots=True)
class _Action:
    """One line of a commit: ``{"add": {…}}``."""

    KIND: ClassVar[str]
    #: Our field names and those of the log.
    NAMES: ClassVar[Mapping[str, str]]

    def as_json(self) -> dict[str, Any]:
        """The content of the action as the log stores it."""
        found: dict[str, Any] = dict(getattr(self, "others", {}))
        for name, stored in self.NAMES.items():
            value = getattr(self, name)
            if value is not None:
                found[stored] = value.as_json() if isinstance(value, DeletionVector) else value
        if "path" in found:
            found["path"] = quote(found["path"], safe=_SAFE)
        return found

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> Self:
        """The action in a log."""
        known = {stored: name for name, stored in cls.NAMES.items()}
        values = {known[stored]: value for stored, value in found.items() if stored in known and value is not None}
        if "path" in values:
            values["path"] = unquote(values["path"])
        if "deletion_vector" in values:
            values["deletion_vector"] = DeletionVector.of_json(values["deletion_vector"])
        if "others" in cls.__slots__:
            values["others"] = {name: value for name, value in found.items() if name not in known and value is not None}
        return cls(**values)

    def line(self) -> str:
        """The action as a line of a commit."""
        return _compact({self.KIND: self.as_json()})


@dataclass(frozen=True, slots=True)
class Add(_Action):
    """A data file of the table, with the vector of its deleted rows."""

    KIND: ClassVar[str] = "add"
    NAMES: ClassVar[Mapping[str, str]] = {
        "path": "path",
        "partition_values": "partitionValues",
        "size": "size",
        "modified_ms": "modificationTime",
        "data_change": "dataChange",
        "stats": "stats",
        "deletion_vector": "deletionVector",
    }

    #: Below the table's root, not percent-encoded.
    path: str
    size: int
    modified_ms: int
    data_change: bool = True
    #: Statistics as JSON text; ``numRecords`` counts deleted rows too.
    stats: str | None = None
    deletion_vector: DeletionVector | None = None
    partition_values: Mapping[str, str | None] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)

    @property
    def file(self) -> tuple[str, str]:
        """Path and vector id, which identify the file in the log."""
        return self.path, self.vector_id

    @property
    def vector_id(self) -> str:
        """The id of the vector; empty without one."""
        return self.deletion_vector.id if self.deletion_vector else ""

    @property
    def dead(self) -> int:
        """Number of deleted rows."""
        return self.deletion_vector.cardinality if self.deletion_vector else 0

    @property
    def rows(self) -> int | None:
        """Number of rows in the file, deleted ones included; None if the statistics do not say."""
        return self.statistics.get("numRecords")

    @property
    def statistics(self) -> dict[str, Any]:
        """The statistics, parsed."""
        return json.loads(self.stats) if self.stats else {}


@dataclass(frozen=True, slots=True)
class Remove(_Action):
    """A data file that no longer belongs to the table, with the vector that it had."""

    KIND: ClassVar[str] = "remove"
    NAMES: ClassVar[Mapping[str, str]] = {
        "path": "path",
        "deleted_ms": "deletionTimestamp",
        "data_change": "dataChange",
        "extended": "extendedFileMetadata",
        "partition_values": "partitionValues",
        "size": "size",
        "deletion_vector": "deletionVector",
    }

    path: str
    deleted_ms: int = 0
    data_change: bool = True
    extended: bool | None = None
    size: int | None = None
    deletion_vector: DeletionVector | None = None
    partition_values: Mapping[str, str | None] | None = None
    others: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, file: Add, now_ms: int, *, data_change: bool) -> "Remove":
        """What removes this file: the descriptor of its vector is repeated."""
        return cls(
            file.path,
            now_ms,
            data_change,
            extended=True,
            size=file.size,
            deletion_vector=file.deletion_vector,
            partition_values=file.partition_values,
        )

    @property
    def file(self) -> tuple[str, str]:
        """Path and vector id, which identify the file in the log."""
        return self.path, self.deletion_vector.id if self.deletion_vector else ""


@dataclass(frozen=True, slots=True)
class Metadata(_Action):
    """The table's id, schema and properties."""

    KIND: ClassVar[str] = "metaData"
    NAMES: ClassVar[Mapping[str, str]] = {
        "id": "id",
        "name": "name",
        "description": "description",
        "format": "format",
        "schema": "schemaString",
        "partition_columns": "partitionColumns",
        "created_ms": "createdTime",
        "properties": "configuration",
    }

    id: str
    #: The schema as JSON text.
    schema: str
    properties: Mapping[str, str] = field(default_factory=dict)
    partition_columns: tuple[str, ...] | list[str] = ()
    created_ms: int | None = None
    name: str | None = None
    description: str | None = None
    format: Mapping[str, Any] = field(default_factory=lambda: {"provider": "parquet", "options": {}})
    others: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Protocol(_Action):
    """The versions and features that readers and writers of the table need."""

    KIND: ClassVar[str] = "protocol"
    NAMES: ClassVar[Mapping[str, str]] = {
        "reader": "minReaderVersion",
        "writer": "minWriterVersion",
        "reader_features": "readerFeatures",
        "writer_features": "writerFeatures",
    }

    reader: int
    writer: int
    reader_features: tuple[str, ...] | list[str] | None = None
    writer_features: tuple[str, ...] | list[str] | None = None
    others: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Txn(_Action):
    """The last transaction of an application."""

    KIND: ClassVar[str] = "txn"
    NAMES: ClassVar[Mapping[str, str]] = {"app": "appId", "version": "version", "updated_ms": "lastUpdated"}

    app: str
    version: int
    updated_ms: int | None = None


@dataclass(frozen=True, slots=True)
class CommitInfo(_Action):
    """What a commit says about itself."""

    KIND: ClassVar[str] = "commitInfo"
    NAMES: ClassVar[Mapping[str, str]] = {
        "timestamp_ms": "timestamp",
        "operation": "operation",
        "parameters": "operationParameters",
        "engine": "engineInfo",
        "id": "txnId",
    }

    timestamp_ms: int = 0
    operation: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    engine: str = ""
    #: Unique, so that a writer recognises its own commit.
    id: str = ""
    others: Mapping[str, Any] = field(default_factory=dict)


Action = Add | Remove | Metadata | Protocol | Txn | CommitInfo
#: Kind in the log -> class.
KINDS: Final[dict[str, type[Action]]] = {each.KIND: each for each in (Add, Remove, Metadata, Protocol, Txn, CommitInfo)}


def encode(actions: Iterable[Action]) -> bytes:
    """The content of a commit file."""
    return "".join(action.line() + "\n" for action in actions).encode()


def decode(content: bytes) -> list[Action]:
    """The actions in a commit file; kinds that Upriver does not need (cdc, domainMetadata, …) are skipped."""
    found: list[Action] = []
    for line in content.splitlines():
        if line.strip():
            for kind, value in json.loads(line).items():
                if kind in KINDS and value is not None:
                    found.append(KINDS[kind].of_json(value))
    return found
