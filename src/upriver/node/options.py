"""The options of a node: from the command line, the environment, a TOML file, or a call.

The command line, ``UPRIVER_…`` variables and the keys of the file use the same names. The command line overrides the
environment, and the environment overrides the file.
"""

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from upriver.errors import InvalidArguments, OptionError, StorageError
from upriver.network import KEEPALIVE_S, is_loopback
from upriver.options import (
    VBUCKETS_MAX,
    YES,
    Reader,
    as_any_text,
    as_count,
    as_flag,
    as_size,
    as_vbuckets,
    find_field,
    hyphenated,
    number,
    one_of,
    option,
    read_toml,
)

#: As in ``upriver.wire``, which would cost every ``--help`` a second. A test compares the two.
BODY_BYTES_MAX: Final = 20 * 2**20 + 0xFFFF + 0xFF

#: The dialects that a listener can be pinned to. The first ones have a 12-byte header and no login.
SHORT_DRAFTS: Final = ("upr_draft1", "upr_draft2")
PINNABLE: Final = (*SHORT_DRAFTS, "upr_draft3", "upr", "dcp", "tap")
#: A smaller quota does not hold a single item of the largest size that clients commonly use.
MEMORY_QUOTA_BYTES_MIN: Final = 2**20


def _quota(value: Any) -> str:
    if 0 < as_size(value) < MEMORY_QUOTA_BYTES_MIN:
        raise ValueError
    return str(value)


def _bucket_name(value: Any) -> str:
    if re.fullmatch(r"[A-Za-z0-9_.%-]{1,100}", as_any_text(value)) is None:
        raise ValueError
    return str(value)


_NAME: Final = Reader(_bucket_name, "1 to 100 letters, digits or any of _ . - %", "NAME")
_PORT: Final = number(0, 65535, whole=True, values="PORT")
_QUOTA: Final = Reader(_quota, "0 for no limit, or a size of at least 1MiB such as 512MiB or 1GiB", "SIZE")
_SECONDS: Final = number(0, values="SECONDS")
_BYTES: Final = number(1, whole=True, values="BYTES")


@dataclasses.dataclass(frozen=True, slots=True)
class ListenAddress:
    """An address to listen on, for every dialect or for one."""

    host: str = ""
    port: int = 0
    dialect: str = ""
    #: Clients are served here without a login.
    anonymous: bool = False

    @property
    def address(self) -> str:
        """``host:port``, as clients take it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """How to run a node."""

    host: str = option("127.0.0.1", as_any_text, "address to listen on", "HOST")
    port: int = option(11210, _PORT, "port to listen on; 0 picks a free one")
    listen: str = option(
        "",
        as_any_text,
        "further addresses, separated by spaces; each can be pinned to one dialect; with a users file, upr_draft1 and"
        " upr_draft2 must be marked anonymous",
        "HOST:PORT[,dialect=NAME][,anonymous]",
    )
    data: str | None = option(None, as_any_text, "directory for the data", "DIR")
    memory: bool = option(False, as_flag, "keep the data in memory only; the default without --data")
    bucket: str = option("default", _NAME, "name of the bucket")
    vbuckets: int = option(1024, number(1, VBUCKETS_MAX, whole=True), "number of vbuckets, a power of two up to 1,024")
    initial_vbuckets: str = option(
        "all", as_any_text, "vbuckets that are active in a new bucket: all, none or ranges like 0-511,700", "RANGES"
    )
    ack: Literal["memory", "disk"] = option(
        "memory", one_of("memory", "disk"), "answer a write when it is in memory, or when it is on disk"
    )
    memory_quota: str = option("1GiB", _QUOTA, "memory limit for items; 0 for no limit")
    replicate_locks: bool = option(
        False, as_flag, "make locks and unlocks changes, so that copies have them; every consumer sees these changes"
    )
    history_s: float = option(600.0, _SECONDS, "keep superseded versions at least this long, unless memory is short")
    history_bytes: int = option(
        2**30, number(0, whole=True, values="BYTES"), "keep older versions too, up to this many bytes in total"
    )
    tombstone_s: float = option(259_200.0, _SECONDS, "keep tombstones of deleted keys for this long")
    users: str | None = option(None, as_any_text, "users file; without one, clients need no login", "FILE")
    insecure: bool = option(False, as_flag, "allow addresses beyond loopback without a users file")
    tls_cert: str | None = option(None, as_any_text, "certificate chain in PEM form; turns TLS on", "FILE")
    tls_key: str | None = option(None, as_any_text, "private key of the certificate", "FILE")
    tls_handshake_s: float = option(
        10.0, number(0.001, values="SECONDS"), "close a connection whose TLS handshake takes longer than this"
    )
    metrics_port: int | None = option(None, _PORT, "port for Prometheus metrics and /healthz; 0 picks a free one")
    metrics_host: str = option("127.0.0.1", as_any_text, "address for the metrics, which need no login", "HOST")
    stall_s: float = option(
        10.0,
        _SECONDS,
        "/healthz fails when a change waits this long for the disk, or a stream stalls for this long",
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", one_of("debug", "info", "warning", "error"), "least severe level to log; logs go to standard error"
    )
    log_format: Literal["plain", "json"] = option("plain", one_of("plain", "json"), "format of the log lines")
    connections_max: int = option(20_000, as_count, "maximum number of connections")
    body_bytes_max: int = option(
        BODY_BYTES_MAX, number(1, BODY_BYTES_MAX, whole=True, values="BYTES"), "refuse requests larger than this"
    )
    unread_bytes_max: int = option(2**20, _BYTES, "stop answering a peer that has this many bytes of unread responses")
    unread_total_bytes_max: int = option(2**28, _BYTES, "memory limit for unread responses of all connections")
    partial_bytes_max: int = option(2**28, _BYTES, "memory limit for partly received requests of all connections")
    stuck_s: float = option(
        60.0,
        _SECONDS,
        "close a peer that has sent part of a request, or left responses unread, and made no progress for this long;"
        " 0 for never",
    )
    login_s: float = option(
        60.0, number(0.1, values="SECONDS"), "with users, close a peer that has not logged in after this long"
    )
    tap_ack_interval: int = option(1000, as_count, "ask TAP clients for an acknowledgement after this many messages")
    tap_ack_window: int = option(10_000, as_count, "maximum number of unacknowledged messages per TAP client")
    tap_backoff_s: float = option(5.0, _SECONDS, "resend a TAP message that was refused temporarily after this long")
    tap_keep_alive_s: float = option(300.0, _SECONDS, "keep the position of a disconnected TAP client for this long")
    tap_noop_interval_s: float = option(200.0, _SECONDS, "interval between no-ops to TAP clients; 0 for never")
    keepalive_s: float = option(
        KEEPALIVE_S,
        _SECONDS,
        "close an idle connection whose peer has answered no TCP keepalive for about this long; 0 for never",
    )
    idle_s: float = option(0.0, _SECONDS, "close connections that are idle for this long; 0 for never")
    #: Where each value comes from, for the error about a bad one.
    origins: dataclasses.InitVar[Mapping[str, str] | None] = None

    def __post_init__(self, origins: Mapping[str, str] | None) -> None:
        name = ""
        try:
            for name in self._check():  # noqa: B007, the last one is to blame
                pass
        except InvalidArguments as error:
            if origins is None or name not in origins:
                raise
            origin, detail = origins[name], error.detail
            if origin in (_flag(name), _variable(name)) and detail.startswith(f"{name} = "):
                raise InvalidArguments(f"{origin}{detail.removeprefix(name)}") from None
            raise InvalidArguments(f"{origin}: {detail}") from None

    def _check(self) -> Iterator[str]:
        """Convert and check the values; yields the name of each before it can be found bad."""
        for field in dataclasses.fields(self):
            yield field.name
            object.__setattr__(self, field.name, _read(field, getattr(self, field.name)))
        yield "data"
        if self.data == "":
            raise InvalidArguments("data = '': give a directory, or use memory")
        if self.data is not None and self.memory:
            raise InvalidArguments("data and memory exclude each other: give one of them")
        if self.data is None:
            object.__setattr__(self, "memory", True)
        yield "tls_cert" if self.tls_key is None else "tls_key"
        if (self.tls_cert is None) is not (self.tls_key is None):
            raise InvalidArguments("tls_cert and tls_key belong together: give both")
        yield "vbuckets"
        if self.vbuckets & (self.vbuckets - 1):
            raise InvalidArguments(f"vbuckets = {self.vbuckets}: it must be a power of two up to {VBUCKETS_MAX}")
        yield "host"
        self._check_exposure(self.host, self.host or "every address")
        yield "metrics_host"
        self._check_exposure(self.metrics_host, f"metrics_host {self.metrics_host or 'every address'}")
        yield "listen"
        for each in parse_listen(self.listen):
            self._check_exposure(each.host, each.address, anonymous=each.anonymous)
        yield "initial_vbuckets"
        parse_initial_vbuckets(self.initial_vbuckets, self.vbuckets)

    def _check_exposure(self, host: str, shown: str, *, anonymous: bool = False) -> None:
        if (self.users is None or anonymous) and not self.insecure and not is_loopback(host):
            raise InvalidArguments(
                f"clients without a login are served on loopback only, not on {shown}; give --users FILE or --insecure"
            )


def _read(field: "dataclasses.Field[Any]", value: Any) -> Any:
    if value is None and field.default is None:
        return None
    try:
        return field.metadata["read"](value)
    except ValueError as error:
        raise InvalidArguments(f"{field.name} = {value!r}: it must be {error}") from None


def parse_initial_vbuckets(text: str, vbuckets: int) -> list[int]:
    """The numbers that ``all``, ``none`` or ranges mean."""
    if text in ("all", "none"):
        return list(range(vbuckets)) if text == "all" else []
    try:
        return list(as_vbuckets(text, vbuckets))
    except ValueError as error:
        raise InvalidArguments(f"initial_vbuckets = {text!r}: it must be all, none or {error}") from None


def parse_listen(text: str) -> list[ListenAddress]:
    """The addresses that ``127.0.0.1:11211,dialect=upr_draft1,anonymous [::1]:11212`` means."""
    return [_listen_address(each) for each in text.split()]


def _listen_address(text: str) -> ListenAddress:
    address, *marks = text.split(",")
    match = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\[\]]+)):(\d{1,5})", address)
    if match is None or int(match[3]) > 65535:
        raise InvalidArguments(f"listen = {text!r}: an address must be HOST:PORT or [HOST]:PORT")
    dialect = next((mark.removeprefix("dialect=") for mark in marks if mark.startswith("dialect=")), "")
    unknown = [mark for mark in marks if mark not in (f"dialect={dialect}", "anonymous")]
    if unknown or (dialect and dialect not in PINNABLE):
        raise InvalidArguments(
            f"listen = {text!r}: only anonymous and dialect=NAME may follow the address;"
            f" NAME is one of {', '.join(PINNABLE)}"
        )
    if "anonymous" in marks and dialect not in SHORT_DRAFTS:
        raise InvalidArguments(
            f"listen = {text!r}: only {' and '.join(SHORT_DRAFTS)} may be anonymous; clients of other dialects can log"
            " in"
        )
    return ListenAddress(match[1] or match[2], int(match[3]), dialect, "anonymous" in marks)


def gather(
    given: Mapping[str, Any], environment: Mapping[str, str] = os.environ, file: str | None = None
) -> NodeOptions:
    """The options from the command line (``given``), then the environment, then the file, then the defaults."""
    names = [field.name for field in dataclasses.fields(NodeOptions)]
    file, given_by = (file, "--config") if file else (environment.get(_variable("config")), _variable("config"))
    in_environment = {name: _variable(name) for name in names}
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for layer, places in (
        ({} if file is None else _from_file(Path(file), given_by), dict.fromkeys(names, str(file))),
        ({name: environment[key] for name, key in in_environment.items() if key in environment}, in_environment),
        (
            {name: value for name, value in given.items() if value is not None},
            {name: _flag(name) for name in names},
        ),
    ):
        # Data on disk and in memory exclude each other: a layer with one of them overrides the other of lower layers.
        if "data" in layer and "memory" not in layer:
            values.pop("memory", None)
        elif str(layer.get("memory", "no")).lower() in YES and "data" not in layer:
            values.pop("data", None)
        values |= layer
        origins |= {name: places[name] for name in layer}
    return NodeOptions(**values, origins=origins)


def _flag(name: str) -> str:
    return f"--{hyphenated(name)}"


def _variable(name: str) -> str:
    return f"UPRIVER_{name.upper()}"


def _from_file(path: Path, given_by: str) -> dict[str, Any]:
    try:
        return {find_field(NodeOptions, name, value, str).name: value for name, value in read_toml(path).items()}
    except StorageError as error:
        raise InvalidArguments(f"{given_by} {error}") from None
    except OptionError as error:
        raise InvalidArguments(f"{path}: {error}") from None
