"""The options that every pipeline has. A pipeline's own options are a subclass of ``PipelineOptions``.

The same text works after ``--key-prefix`` on the command line, as ``key-prefix`` or ``key_prefix`` in a TOML file, and
as ``key_prefix=`` in Python.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, Self

from upriver.client.transport import Address
from upriver.network import KEEPALIVE_S
from upriver.options import as_count, as_flag, hyphenated, one_of, option, read_fields
from upriver.spark import DIALECTS, ReadOptions, as_address

#: A batch of this size is written in a second or two, and fits into the memory of a small machine.
ROWS_MAX: Final = 200_000
#: Pipelines need seqnos to resume, to limit batches and to undo lost changes. TAP has none.
_DIALECTS: Final = tuple(name for name in DIALECTS if name != "tap")
_NAMES: Final = {"source": "from"}


def same_as(name: str, help_text: str = "", values: str = "") -> Any:
    """The option of this name of the Spark source, perhaps with another help."""
    (field,) = (field for field in dataclasses.fields(ReadOptions) if field.name == name)
    told = field.metadata
    return option(field.default, told["read"], help_text or told["help"], values or told["values"])


def shown_name(name: str) -> str:
    """The name of an option as people write it: ``key-prefix``, and ``from`` for the source."""
    return hyphenated(_NAMES.get(name, name))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """The options of every job: where its source is."""

    source: Address = option(Address.parse("127.0.0.1:11210"), as_address, "cluster to read from", "HOST:PORT or a URL")

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """The options from texts by name; ``OptionError`` for the first invalid one."""
        texts = {
            _NAMES.get(name, name): value if isinstance(value, Address) else as_typed(value)
            for name, value in given.items()
            if value is not None
        }
        return cls(**read_fields(cls, texts, shown_name))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions(JobOptions):
    """The options of every pipeline: which changes it reads."""

    vbuckets: tuple[int, ...] | None = same_as("vbuckets", values="0-511,700")
    key_prefix: str | None = same_as("key_prefix")
    key_filter: str | None = same_as("key_filter")
    value_filter: str | None = same_as("value_filter")
    start: str = option("earliest", one_of("earliest", "latest"), "where a pipeline without a checkpoint starts")
    dialect: str = option("dcp", one_of(*_DIALECTS), "dialect to speak to the nodes")
    stream_port: int | None = same_as("stream_port")
    max_rows: int = option(ROWS_MAX, as_count, "maximum number of changes in a batch")
    persisted_only: bool = same_as("persisted_only")
    fail_on_data_loss: bool = option(
        True, as_flag, "fail if a vbucket is gone or its history was replaced; otherwise it is read again"
    )

    def reader_options(self) -> dict[str, str]:
        """These options for ``spark.readStream.format("upriver")``."""
        said: dict[str, Any] = {
            **connection(self.source),
            "vbuckets": None if self.vbuckets is None else ",".join(map(str, self.vbuckets)),
            "keyPrefix": self.key_prefix,
            "keyFilter": self.key_filter,
            "valueFilter": self.value_filter,
            "startingOffsets": self.start,
            "dialect": self.dialect,
            "streamPort": self.stream_port,
            "maxRowsPerTrigger": self.max_rows,
            "persistedOnly": self.persisted_only or None,
            "failOnDataLoss": self.fail_on_data_loss,
        }
        return {name: as_typed(value) for name, value in said.items() if value is not None}


def connection(address: Address) -> dict[str, str]:
    """An address as options of the Spark source and sink."""
    hosts = ",".join(map(str, address.endpoints))
    said: dict[str, Any] = {
        "address": hosts if address.keepalive_s == KEEPALIVE_S else _with_keepalive(hosts, address.keepalive_s),
        "bucket": address.bucket,
        "user": address.user,
        "password": address.password,
        "tls": address.tls or None,
        "ca": address.ca,
    }
    return {name: as_typed(value) for name, value in said.items() if value is not None}


def _with_keepalive(hosts: str, keepalive_s: float) -> str:
    return f"upriver://{hosts}?keepalive_s={keepalive_s:g}"


def as_typed(value: Any) -> str:
    """A value from a TOML file, or an address, as it would be typed."""
    if isinstance(value, Address):
        return value.as_text()
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
