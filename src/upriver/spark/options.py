"""The options of the Spark source and sink.

Spark's options are text, and their names are case-insensitive. Names that Spark's Kafka source has mean the same here.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any, Final, Self

from upriver.client.consumer import ColumnName, ConsumerSettings, DialectName, default_name
from upriver.client.transport import Address
from upriver.errors import AddressError, OffsetError, OptionError
from upriver.model import VBUCKETS_MAX
from upriver.options import (
    as_any_text,
    as_count,
    as_flag,
    as_jvm_size,
    as_port,
    as_seconds,
    as_text,
    as_vbuckets,
    number,
    one_of,
    option,
    read_fields,
)
from upriver.spark.batch_planner import POLICIES, Policy, Rules
from upriver.spark.offsets import read_offset

#: Options of Spark itself, which it passes on among ours.
_OF_SPARK: Final = frozenset({"checkpointlocation", "queryname"})
DIALECTS: Final = ("dcp", "upr", "upr_draft1", "upr_draft2", "upr_draft3", "tap")
VALUE_FORMATS: Final = ("binary", "string", "json")


def as_address(value: Any) -> Address:
    """The address of a cluster."""
    try:
        return Address.parse(value)
    except AddressError as error:
        raise ValueError(f"a valid address: {error.why}") from None


def as_vbuckets_or_all(value: str) -> tuple[int, ...] | None:
    """Numbers and ranges of vbuckets; None for all."""
    try:
        return None if value.lower() == "all" else as_vbuckets(value)
    except ValueError as error:
        raise ValueError(f"all, or {error}") from None


def as_offsets(value: str) -> Any:
    """Offsets: a word, or JSON."""
    if value.lower() in ("earliest", "latest"):
        return value.lower()
    try:
        return read_offset(value)
    except OffsetError as error:
        raise ValueError(f"earliest, latest or JSON per vbucket ({error})") from None


def as_ends(value: str) -> Any:
    """Offsets at which a batch query ends."""
    offsets = as_offsets(value)
    if "earliest" in (offsets.values() if isinstance(offsets, dict) else [offsets]):
        raise ValueError("latest or JSON with seqnos: a query that ends at earliest reads nothing")
    return offsets


def as_value_filter(value: str) -> str:
    """A condition on JSON values."""
    try:
        given = json.loads(value, parse_int=str)  # the node decides how large a number may be
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict) or not isinstance(given.get("field"), str):
        raise ValueError('JSON such as {"field": "a.b", "equals": 1}')
    return value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """Where the cluster is, and how to log in."""

    address: Address = option(
        Address.parse("127.0.0.1:11210"), as_address, "nodes of the cluster", "HOST:PORT,… or a URL"
    )
    bucket: str | None = option(None, as_text, "bucket; by default the one in the address, or the only one")
    user: str | None = option(None, as_text, "user name")
    password: str | None = option(None, as_any_text, "password of the user")
    tls: bool | None = option(None, as_flag, "use TLS; by default as the address says")
    ca: str | None = option(None, as_text, "file with trusted certificates")

    @property
    def cluster(self) -> Address:
        """The address with the values of the other options."""
        said = {name: getattr(self, name) for name in ("bucket", "user", "password", "tls", "ca")}
        return dataclasses.replace(self.address, **{name: value for name, value in said.items() if value is not None})

    @classmethod
    def read(cls, options: Mapping[str, str]) -> Self:
        """The options that Spark passes; ``OptionError`` for the first invalid one."""
        given = {name: value for name, value in options.items() if name.lower() not in _OF_SPARK}
        return cls(**read_fields(cls, given, spark_name))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions(ConnectionOptions):
    """What a query reads, and how."""

    dialect: DialectName = option("dcp", one_of(*DIALECTS), "dialect to speak to the nodes")
    stream_port: int | None = option(
        None, as_port, "port for stream requests, if it differs from the nodes' port; for listeners of one draft"
    )
    name: str | None = option(None, as_text, "name of the connections in the nodes' statistics")
    vbuckets: tuple[int, ...] | None = option(None, as_vbuckets_or_all, "vbuckets to read", "all or 0-511,700")
    starting_offsets: Any = option("earliest", as_offsets, "where a new query starts", "earliest, latest or JSON")
    ending_offsets: Any = option("latest", as_ends, "where a batch query ends", "latest or JSON")
    max_rows_per_trigger: int | None = option(None, as_count, "maximum number of changes in a micro-batch")
    max_bytes_per_trigger: int | None = option(None, as_jvm_size, "estimated maximum size of a micro-batch")
    min_rows_per_trigger: int | None = option(None, as_count, "start a batch only when this many changes are waiting")
    max_trigger_delay: float = option(
        900.0, as_seconds, "start a batch after this time, even with fewer changes than minRowsPerTrigger"
    )
    min_partitions: int | None = option(None, as_count, "minimum number of tasks, at most one per vbucket")
    cores: int | None = option(
        None, as_count, "number of cores that tasks can use; default: the cores of the driver's machine"
    )
    on_rollback: Policy = option("fail", one_of(*POLICIES), "what to do when the source rolls back")
    fail_on_data_loss: bool = option(True, as_flag, "fail if a vbucket is gone or its history was replaced")
    flush_resets: bool = option(
        False, as_flag, "treat a replaced history, as after a flush, as a reset instead of data loss"
    )
    keys_only: bool = option(False, as_flag, "do not fetch values")
    key_prefix: str | None = option(None, as_text, "only keys that start with this")
    key_filter: str | None = option(None, as_text, "only keys that match this RE2 pattern", "PATTERN")
    value_filter: str | None = option(
        None, as_value_filter, "only changes whose JSON value matches this condition", "JSON"
    )
    persisted_only: bool = option(False, as_flag, "only changes that are on the source's disk")
    history: bool = option(False, as_flag, "every retained version of a key, not only the newest")
    value_format: str = option(
        "binary", one_of(*VALUE_FORMATS), "type of the value column; json is text that `changes()` parses"
    )
    value_schema: str | None = option(None, as_text, "with json: schema of the documents, in Spark's syntax", "DDL")
    rows_per_batch: int = option(65_536, as_count, "maximum number of rows in a record batch")
    output: str = option(
        "changes", one_of("changes", "ranges"), "what a row of a stream is: a change, or the ranges of one task"
    )
    shards: int | None = option(None, as_count, "with ranges: vbucket v belongs to task v mod N in every batch", "N")
    rows_per_task: int = option(1_000_000, as_count, "with ranges: maximum number of changes of a task")
    bytes_per_task: int = option(256 * 1024 * 1024, as_jvm_size, "with ranges: estimated maximum size of a task")

    def __post_init__(self) -> None:
        if self.dialect == "tap":
            self._check_tap()
        if self.key_prefix is not None and self.key_filter is not None:
            raise OptionError(
                "keyFilter", self.key_filter, "keyPrefix is given as well: put the prefix into the pattern, as ^prefix"
            )
        if self.value_schema is not None and self.value_format != "json":
            raise OptionError("valueSchema", self.value_schema, "it needs valueFormat = json")
        if None not in (self.min_rows_per_trigger, self.max_rows_per_trigger):
            assert self.min_rows_per_trigger is not None
            assert self.max_rows_per_trigger is not None
            if self.min_rows_per_trigger > self.max_rows_per_trigger:
                raise OptionError("minRowsPerTrigger", str(self.min_rows_per_trigger), "it exceeds maxRowsPerTrigger")

    def _check_tap(self) -> None:
        """TAP has neither seqnos nor branches: refuse options that it cannot honour instead of ignoring them."""
        impossible = {
            "startingOffsets": self.starting_offsets != "earliest",
            "endingOffsets": self.ending_offsets != "latest",
            "maxRowsPerTrigger": self.max_rows_per_trigger is not None,
            "maxBytesPerTrigger": self.max_bytes_per_trigger is not None,
            "onRollback": self.on_rollback == "emit",
            "keyPrefix": self.key_prefix is not None,
            "keyFilter": self.key_filter is not None,
            "valueFilter": self.value_filter is not None,
            "persistedOnly": self.persisted_only,
            "history": self.history,
            "output": self.output != "changes",
        }
        asked = [name for name, is_asked in impossible.items() if is_asked]
        if asked:
            raise OptionError(
                "dialect",
                "tap",
                f"TAP has no seqnos, so a query cannot limit, filter or repeat ranges: leave out "
                f"{', '.join(asked)}{' (or use rewind)' if 'onRollback' in asked else ''}, or use dcp",
            )

    def consumer_settings(self, columns: tuple[ColumnName, ...]) -> ConsumerSettings:
        """The settings of this query's connections."""
        prefix = None if self.key_prefix is None else "^" + re.escape(self.key_prefix)
        return ConsumerSettings(
            dialect=self.dialect,
            keys_only=self.keys_only,
            key_filter=prefix or self.key_filter,
            value_filter=self.value_filter,
            persisted_only=self.persisted_only,
            history=self.history,
            columns=columns,
            exact_end=True,
            stream_port=self.stream_port,
            name="" if self.name is None else f"{self.name}:{default_name()}",
        )

    @property
    def rules(self) -> Rules:
        """What to do when the source has lost changes."""
        has_ranges = self.dialect != "tap"
        return Rules(self.on_rollback, self.fail_on_data_loss, self.flush_resets, has_ranges=has_ranges)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions(ConnectionOptions):
    """What is written, and how."""

    mode: str = option(
        "upsert", one_of("upsert", "meta"), "write as a client does, or with the CAS, revision and expiry of the rows"
    )
    conflicts: str = option(
        "resolve",
        one_of("resolve", "force"),
        "with meta: resolve keeps the newer version, force always writes ours",
    )
    source_vbuckets: int | None = option(
        None,
        number(0, VBUCKETS_MAX, whole=True, values="N"),
        "number of vbuckets where the rows come from, to keep documents that are in another vbucket than their key's; "
        "0 lets the keys decide",
    )
    errors_as: str = option("fail", one_of("fail", "ignore", "deadletter"), "what to do with rows that a node refuses")
    dead_letter_path: str | None = option(None, as_text, "directory for refused rows, as Parquet", "DIR")
    batch_rows: int = option(16_384, as_count, "rows in flight per task")

    def __post_init__(self) -> None:
        if (self.errors_as == "deadletter") is not (self.dead_letter_path is not None):
            raise OptionError(
                "errorsAs", self.errors_as, "errorsAs = deadletter and deadLetterPath belong together: give both"
            )


def spark_name(name: str) -> str:
    """``starting_offsets`` as Spark writes it: ``startingOffsets``."""
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)
