"""What a task learns about the fields of documents: those that have no column yet, and decimals in integer columns.

Tasks return reports, the driver adds them up and decides which columns the table gets. A report is bounded: it keeps
the most frequent names of ``NAMES_MAX``, so that documents with random field names cannot fill the memory.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from upriver.tables.schema import KINDS, Kind

NAMES_MAX: Final = 4096


@dataclass(frozen=True)
class FieldReport:
    """Counts of the valid documents of a batch; reports can be added."""

    #: JSON objects.
    documents: int = 0
    #: Fields without a column, in the order of the documents: how many documents hold a value of each kind.
    unknown: Mapping[str, Mapping[Kind, int]] = field(default_factory=dict)
    #: Integer columns for which a document has a decimal.
    decimals: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        """Whether the schema could change."""
        return bool(self.unknown or self.decimals)

    def __add__(self, other: "FieldReport") -> "FieldReport":
        unknown = {name: dict(counts) for name, counts in self.unknown.items()}
        for name, counts in other.unknown.items():
            known = unknown.setdefault(name, {})
            for kind, count in counts.items():
                known[kind] = known.get(kind, 0) + count
        decimals = self.decimals | other.decimals
        return FieldReport(self.documents + other.documents, most_frequent(unknown, NAMES_MAX), decimals)

    def as_bytes(self) -> bytes:
        """For the way from a task to the driver."""
        unknown = {name: [counts.get(kind, 0) for kind in KINDS] for name, counts in self.unknown.items()}
        return json.dumps([self.documents, unknown, sorted(self.decimals)], separators=(",", ":")).encode()

    @classmethod
    def of_bytes(cls, data: bytes) -> "FieldReport":
        documents, unknown, decimals = json.loads(data)
        counts: dict[str, Mapping[Kind, int]] = {
            name: {kind: count for kind, count in zip(KINDS, found, strict=True) if count}
            for name, found in unknown.items()
        }
        return cls(documents, counts, frozenset(decimals))


def most_frequent(unknown: Mapping[str, Mapping[Kind, int]], names_max: int) -> Mapping[str, Mapping[Kind, int]]:
    """The names with the highest counts, and of equal ones the first, in their order."""
    if len(unknown) <= names_max:
        return unknown
    kept = set(sorted(unknown, key=lambda name: -sum(unknown[name].values()))[:names_max])
    return {name: counts for name, counts in unknown.items() if name in kept}
