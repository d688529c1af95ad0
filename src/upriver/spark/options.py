"""The options of the Spark source and sink: each declared once, with its check and its help.

Spark's options are text and know no case. Names that Spark's Kafka source has mean the same here.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Final, Self

from upriver.client.consumer import ConsumerSettings, default_name
from upriver.client.transport import Address
from upriver.errors import OptionError
from upriver.spark.batch_planner import POLICIES, Policy, Rules
from upriver.spark.declared import (
    as_address,
    as_count,
    as_ends,
    as_flag,
    as_offsets,
    as_port,
    as_seconds,
    as_size,
    as_text,
    as_value_filter,
    as_vbuckets,
    one_of,
    option,
    read_fields,
)

#: What Spark hands over among the options and keeps for itself.
_OF_SPARK: Final = frozenset({"checkpointlocation", "queryname"})
DIALECTS: Final = ("dcp", "upr", "upr_draft1", "upr_draft2", "upr_draft3", "tap")
VALUE_FORMATS: Final = ("binary", "string", "json")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """Where the cluster is and who we are there."""

    address: Address = option(
        Address.parse("127.0.0.1:11210"), as_address, "nodes of the cluster", values="HOST:PORT,… or a URL"
    )
    bucket: str | None = option(
        None, as_text, "which bucket; by default the one that the address names, or the only one"
    )
    user: str | None = option(None, as_text, "who logs in")
    password: str | None = option(None, str, "with which password")
    tls: bool | None = option(None, as_flag, "encrypt; by default as the address says")
    ca: str | None = option(None, as_text, "file with the certificates that are trusted")

    @property
    def cluster(self) -> Address:
        """The address with everything that the other options say."""
        said = {name: getattr(self, name) for name in ("bucket", "user", "password", "tls", "ca")}
        return dataclasses.replace(self.address, **{name: value for name, value in said.items() if value is not None})

    @classmethod
    def read(cls, options: Mapping[str, str]) -> Self:
        """The options that Spark hands over; one clear error for the first that makes no sense."""
        given = {name: value for name, value in options.items() if name.lower() not in _OF_SPARK}
        return cls(**read_fields(cls, given, spark_name))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions(ConnectionOptions):
    """What a query reads, and how."""

    dialect: str = option("dcp", one_of(*DIALECTS), "what is spoken to the nodes", values=", ".join(DIALECTS))
    stream_port: int | None = option(
        None, as_port, "where the nodes stream, if not where they answer; a listener for one draft", values="PORT"
    )
    name: str | None = option(None, as_text, "what the connections are called in the nodes' statistics", values="TEXT")
    vbuckets: tuple[int, ...] | None = option(None, as_vbuckets, "which vbuckets", values="all or 0-511,700")
    starting_offsets: Any = option(
        "earliest", as_offsets, "where a new query begins", values="earliest, latest or JSON"
    )
    ending_offsets: Any = option("latest", as_ends, "where a batch query ends", values="latest or JSON")
    max_rows_per_trigger: int | None = option(None, as_count, "how many changes a micro-batch may have", values="N")
    max_bytes_per_trigger: int | None = option(None, as_size, "how large it may be, by estimate", values="SIZE")
    min_rows_per_trigger: int | None = option(None, as_count, "wait until there are so many changes", values="N")
    max_trigger_delay: float = option(900.0, as_seconds, "but not longer than this", values="TIME")
    min_partitions: int | None = option(
        None, as_count, "at least so many tasks, if there are so many vbuckets", values="N"
    )
    on_rollback: Policy = option(
        "fail", one_of(*POLICIES), "what happens when the source went back", values=", ".join(POLICIES)
    )
    fail_on_data_loss: bool = option(True, as_flag, "fail if a vbucket is gone or its history was replaced")
    keys_only: bool = option(False, as_flag, "do not fetch values")
    key_prefix: str | None = option(None, as_text, "only keys that begin so", values="TEXT")
    key_filter: str | None = option(None, as_text, "only keys in which this is found", values="RE2 pattern")
    value_filter: str | None = option(
        None, as_value_filter, "only changes whose JSON value has this field", values="JSON"
    )
    persisted_only: bool = option(False, as_flag, "only what is on the source's disk")
    history: bool = option(False, as_flag, "every retained version of a key, not only the newest")
    value_format: str = option(
        "binary",
        one_of(*VALUE_FORMATS),
        "as what values come; json is text that `changes` parses",
        values=", ".join(VALUE_FORMATS),
    )
    value_schema: str | None = option(
        None, as_text, "with json: what the documents look like, as Spark writes a schema", values="DDL"
    )
    rows_per_batch: int = option(65_536, as_count, "rows of one record batch, at most", values="N")

    def __post_init__(self) -> None:
        if self.dialect == "tap":
            self._check_tap()
        if self.key_prefix is not None and self.key_filter is not None:
            raise OptionError(
                "keyFilter", self.key_filter, "keyPrefix is given already: put it into the pattern, as ^prefix"
            )
        if self.value_schema is not None and self.value_format != "json":
            raise OptionError("valueSchema", self.value_schema, "it belongs to valueFormat = json")
        if None not in (self.min_rows_per_trigger, self.max_rows_per_trigger):
            assert self.min_rows_per_trigger is not None
            assert self.max_rows_per_trigger is not None
            if self.min_rows_per_trigger > self.max_rows_per_trigger:
                raise OptionError("minRowsPerTrigger", str(self.min_rows_per_trigger), "it exceeds maxRowsPerTrigger")

    def _check_tap(self) -> None:
        """TAP tells neither seqnos nor branches: better to refuse what it cannot promise than to leave it out."""
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
        }
        asked = [name for name, is_asked in impossible.items() if is_asked]
        if asked:
            raise OptionError(
                "dialect",
                "tap",
                f"it tells no seqnos, so it has no ranges to limit, to filter or to read again: leave out "
                f"{', '.join(asked)}{' (rewind is possible)' if 'onRollback' in asked else ''}, or read dcp",
            )

    def consumer_settings(self, columns: tuple[str, ...]) -> ConsumerSettings:
        """What the connections of this query are told."""
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
        """What happens when the source has lost something."""
        return Rules(self.on_rollback, self.fail_on_data_loss)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions(ConnectionOptions):
    """What is written, and how."""

    mode: str = option(
        "upsert",
        one_of("upsert", "meta"),
        "write as a client does, or with CAS, revision and expiry as they came",
        values="upsert, meta",
    )
    conflicts: str = option(
        "resolve", one_of("resolve", "force"), "with meta: let the newer one win, or ours", values="resolve, force"
    )
    errors_as: str = option(
        "fail",
        one_of("fail", "ignore", "deadletter"),
        "what becomes of rows that the node refuses",
        values="fail, ignore, deadletter",
    )
    dead_letter_path: str | None = option(None, as_text, "directory for refused rows, as Parquet", values="DIR")
    batch_rows: int = option(16_384, as_count, "rows on their way at once, for each task", values="N")

    def __post_init__(self) -> None:
        if (self.errors_as == "deadletter") is not (self.dead_letter_path is not None):
            raise OptionError("errorsAs", self.errors_as, "errorsAs = deadletter and deadLetterPath belong together")


def spark_name(name: str) -> str:
    """``starting_offsets`` as Spark writes it: ``startingOffsets``."""
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)
