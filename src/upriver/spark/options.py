"""The options of the Spark source and sink: each declared once, with its check and its help.

Spark's options are text and know no case. Names that Spark's Kafka source has mean the same here.
"""

import dataclasses
import difflib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Self

from upriver.client.address import Address
from upriver.client.settings import ConsumerSettings
from upriver.errors import AddressError, OffsetError, OptionError
from upriver.spark.offsets import read_offset
from upriver.spark.plan import POLICIES, Policy, Rules

_YES, _NO = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
_TIME_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_SIZE_UNITS: Final = {"b": 1, "k": 2**10, "kb": 2**10, "m": 2**20, "mb": 2**20, "g": 2**30, "gb": 2**30}
#: The dialects that tell seqnos, and with them ranges to read.
DIALECTS: Final = ("dcp", "upr", "upr_draft1", "upr_draft2", "upr_draft3")


def _dialect(value: str) -> str:
    if value.lower() == "tap":
        raise ValueError(f"one of {', '.join(DIALECTS)}: TAP tells no seqnos, so it has no ranges to read")
    return _one_of(*DIALECTS)(value)


def _text(value: str) -> str:
    if not value:
        raise ValueError("a text that is not empty")
    return value


def _flag(value: str) -> bool:
    if value.lower() not in (*_YES, *_NO):
        raise ValueError("true or false")
    return value.lower() in _YES


def _count(value: str) -> int:
    if not value.isascii() or not value.isdigit() or not 0 < int(value[:20]) < 2**63:
        raise ValueError("a number from 1")
    return int(value)


def _measure(value: str, units: Mapping[str, float], what: str) -> float:
    number = value.strip().lower().rstrip("".join(units))
    unit = value.strip().lower()[len(number) :]
    try:
        amount = float(number) * units[unit]
    except (KeyError, ValueError):
        raise ValueError(what) from None
    if not 0 <= amount < 2**63:
        raise ValueError(what)
    return amount


def _seconds(value: str) -> float:
    return _measure(value, _TIME_UNITS, "a time such as 500ms, 30s or 5m")


def _bytes(value: str) -> int:
    size = int(_measure(value, {"": 1, **_SIZE_UNITS}, "a size such as 1000000, 512k or 16m"))
    if not size:
        raise ValueError("a size above 0")
    return size


def _one_of(*allowed: str) -> Callable[[str], str]:
    def read(value: str) -> str:
        if value.lower() not in allowed:
            raise ValueError(f"one of {', '.join(allowed)}")
        return value.lower()

    return read


def _address(value: str) -> Address:
    try:
        return Address.parse(value)
    except AddressError as error:
        raise ValueError(f"HOST:PORT or upriver://user@host:port/bucket ({error.why})") from None


def _offsets(value: str) -> Any:
    if value.lower() in ("earliest", "latest"):
        return value.lower()
    try:
        return read_offset(value)
    except OffsetError as error:
        raise ValueError(f"earliest, latest or JSON per vbucket ({error})") from None


def _vbuckets(value: str) -> tuple[int, ...] | None:
    if value.lower() == "all":
        return None
    numbers: set[int] = set()
    for part in value.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or not int(first) <= int(last or first) < 1024:
            raise ValueError("all, or numbers and ranges below 1024 such as 0-511,700")
        numbers.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(numbers))


def _value_filter(value: str) -> str:
    try:
        given = json.loads(value)
    except ValueError:
        given = None
    if not isinstance(given, dict) or not isinstance(given.get("field"), str):
        raise ValueError('JSON such as {"field": "a.b", "equals": 1}')
    return value


def option(default: Any, read: Callable[[str], Any], meaning: str, *, values: str = "") -> Any:
    """A field with what reads it from text, and its help."""
    return dataclasses.field(default=default, metadata={"read": read, "meaning": meaning, "values": values})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """Where the cluster is and who we are there."""

    address: Address = option(
        Address.parse("127.0.0.1:11210"), _address, "nodes of the cluster", values="HOST:PORT,… or a URL"
    )
    bucket: str | None = option(None, _text, "which bucket; by default the one that the address names, or the only one")
    user: str | None = option(None, _text, "who logs in")
    password: str | None = option(None, str, "with which password")
    tls: bool | None = option(None, _flag, "encrypt; by default as the address says")
    ca: str | None = option(None, _text, "file with the certificates that are trusted")

    @property
    def cluster(self) -> Address:
        """The address with everything that the other options say."""
        said = {name: getattr(self, name) for name in ("bucket", "user", "password", "tls", "ca")}
        return dataclasses.replace(self.address, **{name: value for name, value in said.items() if value is not None})

    @classmethod
    def read(cls, options: Mapping[str, str]) -> Self:
        """The options that Spark hands over; one clear error for the first that makes no sense."""
        fields = {spark_name(field.name).lower(): field for field in dataclasses.fields(cls)}
        given: dict[str, Any] = {}
        for name, value in options.items():
            field = fields.get(name.lower())
            if field is None:
                raise OptionError(name, value, _suggestion(name, [spark_name(each.name) for each in fields.values()]))
            try:
                given[field.name] = field.metadata["read"](str(value).strip())
            except ValueError as error:
                shown = "…" if field.name == "password" else value
                raise OptionError(spark_name(field.name), shown, f"it must be {error}") from None
        return cls(**given)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions(ConnectionOptions):
    """What a query reads, and how."""

    dialect: str = option("dcp", _dialect, "what is spoken to the nodes", values=", ".join(DIALECTS))
    vbuckets: tuple[int, ...] | None = option(None, _vbuckets, "which vbuckets", values="all or 0-511,700")
    starting_offsets: Any = option("earliest", _offsets, "where a new query begins", values="earliest, latest or JSON")
    ending_offsets: Any = option("latest", _offsets, "where a batch query ends", values="latest or JSON")
    max_rows_per_trigger: int | None = option(None, _count, "how many changes a micro-batch may have", values="N")
    max_bytes_per_trigger: int | None = option(None, _bytes, "how large it may be, by estimate", values="SIZE")
    min_rows_per_trigger: int | None = option(None, _count, "wait until there are so many changes", values="N")
    max_trigger_delay: float = option(900.0, _seconds, "but not longer than this", values="TIME")
    min_partitions: int | None = option(
        None, _count, "at least so many tasks, if there are so many vbuckets", values="N"
    )
    on_rollback: Policy = option(
        "fail", _one_of(*POLICIES), "what happens when the source went back", values=", ".join(POLICIES)
    )
    fail_on_data_loss: bool = option(True, _flag, "fail if a vbucket is gone or its history was replaced")
    keys_only: bool = option(False, _flag, "do not fetch values")
    key_prefix: str | None = option(None, _text, "only keys that begin so", values="TEXT")
    key_filter: str | None = option(None, _text, "only keys in which this is found", values="RE2 pattern")
    value_filter: str | None = option(
        None, _value_filter, "only changes whose JSON value has this field", values="JSON"
    )
    persisted_only: bool = option(False, _flag, "only what is on the source's disk")
    history: bool = option(False, _flag, "every retained version of a key, not only the newest")
    value_format: str = option("binary", _one_of("binary", "string"), "as what values come", values="binary, string")
    rows_per_batch: int = option(65_536, _count, "rows of one record batch, at most", values="N")

    def __post_init__(self) -> None:
        if self.ending_offsets == "earliest":
            raise OptionError(
                "endingOffsets", "earliest", "there is nothing before the beginning: write latest or JSON"
            )
        if self.key_prefix is not None and self.key_filter is not None:
            raise OptionError(
                "keyFilter", self.key_filter, "keyPrefix is given already: put it into the pattern, as ^prefix"
            )
        if None not in (self.min_rows_per_trigger, self.max_rows_per_trigger):
            assert self.min_rows_per_trigger is not None
            assert self.max_rows_per_trigger is not None
            if self.min_rows_per_trigger > self.max_rows_per_trigger:
                raise OptionError("minRowsPerTrigger", str(self.min_rows_per_trigger), "it exceeds maxRowsPerTrigger")

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
        _one_of("upsert", "meta"),
        "write as a client does, or with CAS, revision and expiry as they came",
        values="upsert, meta",
    )
    conflicts: str = option(
        "resolve", _one_of("resolve", "force"), "with meta: let the newer one win, or ours", values="resolve, force"
    )
    errors_as: str = option(
        "fail",
        _one_of("fail", "ignore", "deadletter"),
        "what becomes of rows that the node refuses",
        values="fail, ignore, deadletter",
    )
    dead_letter_path: str | None = option(None, _text, "directory for refused rows, as Parquet", values="DIR")
    batch_rows: int = option(16_384, _count, "rows on their way at once, for each task", values="N")

    def __post_init__(self) -> None:
        if (self.errors_as == "deadletter") is not (self.dead_letter_path is not None):
            raise OptionError("errorsAs", self.errors_as, "errorsAs = deadletter and deadLetterPath belong together")


def spark_name(name: str) -> str:
    """``starting_offsets`` as Spark writes it: ``startingOffsets``."""
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def _suggestion(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name.lower(), [each.lower() for each in known], 1)
    if close:
        return f"there is no such option; did you mean {next(each for each in known if each.lower() == close[0])}?"
    return f"there is no such option; known are {', '.join(sorted(known))}"
