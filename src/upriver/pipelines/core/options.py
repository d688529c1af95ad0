"""What every pipeline may be told, declared once for the command line, for files and for the docs.

A pipeline's own options are a subclass of ``PipelineOptions``: frozen, each field an ``option`` with what reads it from
text and its help. The same text works after ``--key-prefix`` on the command line, as ``key-prefix`` or ``key_prefix``
in a TOML file, and as ``key_prefix=`` in Python.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, Self

from upriver.client.transport import Address
from upriver.spark import DIALECTS, ReadOptions, as_address, as_count, as_flag, one_of, option, read_fields

#: A batch of so many changes is written in a second or two, and fits into the memory of a small machine.
ROWS_MAX: Final = 200_000
#: A pipeline resumes, limits its batches and undoes what was lost: for all of that a stream must tell seqnos.
_DIALECTS: Final = tuple(name for name in DIALECTS if name != "tap")
_NAMES: Final = {"source": "from"}


def same_as(name: str, **changed: Any) -> Any:
    """An option that means what it means to the Spark source."""
    field = next(field for field in dataclasses.fields(ReadOptions) if field.name == name)
    return dataclasses.field(default=changed.pop("default", field.default), metadata={**field.metadata, **changed})


def shown_name(name: str) -> str:
    """How people write the option that a field holds: ``key-prefix``, and ``from`` for the source."""
    return _NAMES.get(name, name).replace("_", "-")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """What every job is told: where its source is."""

    source: Address = option(
        Address.parse("127.0.0.1:11210"), as_address, "the cluster that is read", values="HOST:PORT or a URL"
    )

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """The options that these texts mean; one clear error for the first that makes no sense."""
        texts = {
            _NAMES.get(name, name): value if isinstance(value, Address) else as_typed(value)
            for name, value in given.items()
            if value is not None
        }
        return cls(**read_fields(cls, texts, shown_name))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions(JobOptions):
    """What every pipeline is told of the changes that it reads."""

    vbuckets: tuple[int, ...] | None = same_as("vbuckets", meaning="only these vbuckets", values="0-511,700")
    key_prefix: str | None = same_as("key_prefix")
    key_filter: str | None = same_as("key_filter")
    value_filter: str | None = same_as("value_filter")
    start: str = option(
        "earliest",
        one_of("earliest", "latest"),
        "where a pipeline without a checkpoint begins",
        values="earliest, latest",
    )
    dialect: str = same_as("dialect", read=one_of(*_DIALECTS), values=", ".join(_DIALECTS))
    max_rows: int = option(ROWS_MAX, as_count, "how many changes a batch may have", values="N")
    persisted_only: bool = same_as("persisted_only")
    fail_on_data_loss: bool = option(
        True, as_flag, "fail if a vbucket is gone or its history was replaced; else it is read anew"
    )

    def reader_options(self) -> dict[str, str]:
        """The same for ``spark.readStream.format("upriver")``."""
        said: dict[str, Any] = {
            **connection(self.source),
            "vbuckets": None if self.vbuckets is None else ",".join(map(str, self.vbuckets)),
            "keyPrefix": self.key_prefix,
            "keyFilter": self.key_filter,
            "valueFilter": self.value_filter,
            "startingOffsets": self.start,
            "dialect": self.dialect,
            "maxRowsPerTrigger": self.max_rows,
            "persistedOnly": self.persisted_only or None,
            "failOnDataLoss": self.fail_on_data_loss,
        }
        return {name: as_typed(value) for name, value in said.items() if value is not None}


def connection(address: Address) -> dict[str, str]:
    """An address as options of the Spark source and sink."""
    said: dict[str, Any] = {
        "address": ",".join(map(str, address.endpoints)),
        "bucket": address.bucket,
        "user": address.user,
        "password": address.password,
        "tls": address.tls or None,
        "ca": address.ca,
    }
    return {name: as_typed(value) for name, value in said.items() if value is not None}


def as_typed(value: Any) -> str:
    """What may stand in a file, as it would be typed."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
