"""The options of a node: from the command line, the environment, a TOML file, or a call.

Each option is declared once, as a field with its help. The command line shows them, ``UPRIVER_…`` variables and the
keys of the file bear the same names; the command line wins over the environment, the environment over the file.
"""

import dataclasses
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args, get_origin

from upriver.errors import InvalidArguments
from upriver.network import is_loopback

#: What the engine and the wire allow, written here again because importing them would cost every ``--help`` a second;
#: a test holds the numbers together.
VBUCKETS_MAX: Final = 1024
BODY_BYTES_MAX: Final = 20 * 2**20 + 0xFFFF + 0xFF

#: The dialects that a listener can be pinned to; those with the 12-byte header, which have no login, first.
SHORT_DRAFTS: Final = ("upr_draft1", "upr_draft2")
PINNABLE: Final = (*SHORT_DRAFTS, "upr_draft3", "upr", "dcp", "tap")
#: Less than this does not hold a single item of the largest size that clients commonly use.
MEMORY_QUOTA_BYTES_MIN: Final = 2**20

#: No number of bytes, seconds or whatever else is larger: the compiled parts count in 64 bits.
NUMBER_MAX: Final = 2**62

_UNITS: Final = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def option(
    default: Any, help_text: str, metavar: str = "", least: float | None = None, most: float = NUMBER_MAX
) -> Any:
    """A field of ``NodeOptions`` with its help and, for a number, its bounds."""
    return dataclasses.field(
        default=default, metadata={"help": help_text, "metavar": metavar, "least": least, "most": most}
    )


@dataclasses.dataclass(frozen=True, slots=True)
class ListenAddress:
    """An address to listen on, and what is spoken there: everything, or one dialect only."""

    host: str = ""
    port: int = 0
    dialect: str = ""
    #: Nobody has to log in here.
    anonymous: bool = False

    @property
    def address(self) -> str:
        """``host:port``, as clients take it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """How to run a node."""

    host: str = option("127.0.0.1", "address to listen on", "HOST")
    port: int = option(11210, "port to listen on; 0 picks a free one", "PORT", 0, 65535)
    listen: str = option(
        "",
        "further addresses, separated by spaces; each may be pinned to one dialect, and one of the 12-byte drafts"
        " needs to be marked anonymous where users are configured",
        "HOST:PORT[,dialect=NAME][,anonymous]",
    )
    data: str | None = option(None, "directory to keep the data in", "DIR")
    memory: bool = option(False, "keep the data in memory only; so it is without --data")
    bucket: str = option("default", "name of the bucket", "NAME")
    vbuckets: int = option(VBUCKETS_MAX, "number of vbuckets, a power of two up to 1,024", "N", 1, VBUCKETS_MAX)
    initial_vbuckets: str = option(
        "all", "which vbuckets a new bucket makes active: all, none or ranges like 0-511,700", "RANGES"
    )
    ack: Literal["memory", "disk"] = option("memory", "answer writes when they are in memory or on disk")
    memory_quota: str = option("1GiB", "how much memory items may take; 0 for no limit", "SIZE")
    history_s: float = option(
        600.0, "keep superseded versions for at least so many seconds, unless memory is short", "SECONDS", 0
    )
    history_bytes: int = option(2**30, "keep older ones too, up to so many bytes of all of them", "BYTES", 0)
    tombstone_s: float = option(259_200.0, "remember that a key was deleted for so many seconds", "SECONDS", 0)
    users: str | None = option(None, "file of the users; without one nobody has to authenticate", "FILE")
    insecure: bool = option(False, "listen beyond loopback although there is no users file")
    tls_cert: str | None = option(None, "certificate chain in PEM form: serve TLS", "FILE")
    tls_key: str | None = option(None, "private key of the certificate", "FILE")
    tls_handshake_s: float = option(10.0, "close a peer that takes longer over its TLS handshake", "SECONDS", 0.001)
    metrics_port: int | None = option(
        None, "serve Prometheus metrics and /healthz on this port; 0 picks a free one", "PORT", 0, 65535
    )
    metrics_host: str = option("127.0.0.1", "address to serve the metrics on, to anybody who asks", "HOST")
    stall_s: float = option(
        10.0,
        "/healthz turns red when a change waits so many seconds for the disk, or a stream stands still",
        "SECONDS",
        0,
    )
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "how much to log, on standard error")
    log_format: Literal["plain", "json"] = option("plain", "form of the log lines")
    connections_max: int = option(20_000, "refuse further connections beyond so many", "N", 1)
    body_bytes_max: int = option(BODY_BYTES_MAX, "refuse larger requests", "BYTES", 1, BODY_BYTES_MAX)
    unread_bytes_max: int = option(
        1024 * 1024, "stop answering a peer that leaves so many bytes of answers unread", "BYTES", 1
    )
    unread_total_bytes_max: int = option(
        256 * 2**20, "how many bytes of unread answers to keep, of all connections together", "BYTES", 1
    )
    partial_bytes_max: int = option(
        256 * 2**20, "how much of half-received requests to keep, of all connections together", "BYTES", 1
    )
    stuck_s: float = option(
        60.0,
        "close a peer that has sent half a request, or leaves answers unread, and moves nothing more for so many"
        " seconds; 0 for never",
        "SECONDS",
        0,
    )
    login_s: float = option(60.0, "with users, close a peer that has not logged in for so many seconds", "SECONDS", 0.1)
    tap_ack_interval: int = option(1000, "ask TAP clients to acknowledge every so many messages", "N", 1)
    tap_ack_window: int = option(10_000, "so many messages may a TAP client leave unacknowledged", "N", 1)
    tap_backoff_s: float = option(
        5.0, "send a TAP message that was refused for the moment again after so many seconds", "SECONDS", 0
    )
    tap_keep_alive_s: float = option(
        300.0, "keep the place of a named TAP client that has gone for so many seconds", "SECONDS", 0
    )
    tap_noop_interval_s: float = option(
        200.0, "send TAP clients a noop every so many seconds; 0 for never", "SECONDS", 0
    )
    idle_s: float = option(0.0, "close connections that are idle for so many seconds; 0 for never", "SECONDS", 0)
    #: Where the values stand, by name, to say it of a bad one.
    origins: dataclasses.InitVar[Mapping[str, str] | None] = None

    def __post_init__(self, origins: Mapping[str, str] | None) -> None:
        name = ""
        try:
            for name in self._check():  # noqa: B007, the last one is to blame
                pass
        except InvalidArguments as error:
            if origins is None or name not in origins:
                raise
            raise InvalidArguments(f"{origins[name]}: {error.detail}") from None

    def _check(self) -> Iterator[str]:
        """Convert and check the values; the name of each is handed out before it can be found bad."""
        for field in dataclasses.fields(self):
            yield field.name
            object.__setattr__(self, field.name, _converted(field, getattr(self, field.name)))
        yield "data"
        if self.data == "":
            raise InvalidArguments("data is empty: give a directory, or say memory")
        if self.data is not None and self.memory:
            raise InvalidArguments("data and memory exclude each other")
        if self.data is None:
            object.__setattr__(self, "memory", True)
        yield "tls_cert" if self.tls_key is None else "tls_key"
        if (self.tls_cert is None) is not (self.tls_key is None):
            raise InvalidArguments("tls_cert and tls_key belong together")
        yield "vbuckets"
        if self.vbuckets & (self.vbuckets - 1):
            raise InvalidArguments(f"vbuckets = {self.vbuckets}: it is a power of two up to {VBUCKETS_MAX}")
        yield "host"
        if self.users is None and not self.insecure and not is_loopback(self.host):
            raise InvalidArguments(
                f"without a users file the node listens on loopback only, not on {self.host or 'every address'}: "
                "give --users FILE, or say --insecure"
            )
        yield "metrics_host"
        if self.users is None and not self.insecure and not is_loopback(self.metrics_host):
            raise InvalidArguments(
                f"metrics_host = {self.metrics_host!r}: without a users file also the metrics are served on loopback "
                "only: give --users FILE, or say --insecure"
            )
        yield "listen"
        for listen_address in parse_listen(self.listen):
            if (
                (self.users is None or listen_address.anonymous)
                and not self.insecure
                and not is_loopback(listen_address.host)
            ):
                raise InvalidArguments(
                    f"without users only loopback is served, not {listen_address.address}: add users or say --insecure"
                )
        yield "bucket"
        if re.fullmatch(r"[A-Za-z0-9_.%-]{1,100}", self.bucket) is None:
            raise InvalidArguments(f"bucket = {self.bucket!r}: a name has 1 to 100 letters, digits or any of _ . - %")
        yield "memory_quota"
        if 0 < parse_bytes(self.memory_quota) < MEMORY_QUOTA_BYTES_MIN:
            raise InvalidArguments(
                f"memory_quota = {self.memory_quota!r}: nothing could be stored; it is at least 1MiB, or 0 for no limit"
            )
        yield "initial_vbuckets"
        parse_ranges(self.initial_vbuckets, self.vbuckets)


def parse_bytes(text: str | int) -> int:
    """``1GiB``, ``500 MB`` or ``1024`` as a number of bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(text), re.IGNORECASE)
    if match is None or match[2].upper() not in _UNITS:
        raise InvalidArguments(f"{text!r} is no size: write 512MiB, 1GiB or a number of bytes")
    size = float(match[1]) * _UNITS[match[2].upper()]
    if size > NUMBER_MAX:
        raise InvalidArguments(f"{text!r} is more than any machine has: write 512MiB, 1GiB or a number of bytes")
    return int(size)


def parse_ranges(text: str, vbuckets: int) -> list[int]:
    """``all``, ``none`` or ``0-511,700`` as numbers of vbuckets."""
    if text == "all":
        return list(range(vbuckets))
    if text == "none":
        return []
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part)
        if match is None or not int(match[1]) <= int(match[2] or match[1]) < vbuckets:
            raise InvalidArguments(f"{part!r} is no range of vbuckets below {vbuckets}: write all, none or 0-511,700")
        numbers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return sorted(numbers)


def parse_listen(text: str) -> list[ListenAddress]:
    """``127.0.0.1:11211,dialect=upr_draft1,anonymous [::1]:11212`` as listen_addresses."""
    return [_entrance(each) for each in text.split()]


def _entrance(text: str) -> ListenAddress:
    address, *marks = text.split(",")
    match = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\[\]]+)):(\d{1,5})", address)
    if match is None or int(match[3]) > 65535:
        raise InvalidArguments(f"listen = {text!r}: an address is HOST:PORT or [HOST]:PORT")
    dialect = next((mark.removeprefix("dialect=") for mark in marks if mark.startswith("dialect=")), "")
    unknown = [mark for mark in marks if mark not in (f"dialect={dialect}", "anonymous")]
    if unknown or (dialect and dialect not in PINNABLE):
        raise InvalidArguments(
            f"listen = {text!r}: behind the address may stand anonymous and dialect=NAME, one of {', '.join(PINNABLE)}"
        )
    if "anonymous" in marks and dialect not in SHORT_DRAFTS:
        raise InvalidArguments(
            f"listen = {text!r}: only {' and '.join(SHORT_DRAFTS)} may be anonymous: others can log in"
        )
    return ListenAddress(match[1] or match[2], int(match[3]), dialect, "anonymous" in marks)


def gather(
    given: Mapping[str, Any], environment: Mapping[str, str] = os.environ, file: str | None = None
) -> NodeOptions:
    """The options that hold: what the command line gives, else the environment, else the file, else the default."""
    names = [field.name for field in dataclasses.fields(NodeOptions)]
    file = file or environment.get("UPRIVER_CONFIG")
    in_environment = {name: f"UPRIVER_{name.upper()}" for name in names}
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for layer, places in (
        ({} if file is None else _from_file(Path(file), names), dict.fromkeys(names, str(file))),
        ({name: environment[key] for name, key in in_environment.items() if key in environment}, in_environment),
        (
            {name: value for name, value in given.items() if value is not None},
            {name: f"--{name.replace('_', '-')}" for name in names},
        ),
    ):
        # Data on disk and in memory exclude each other, and the layer that says either overrides what lies below.
        if "data" in layer and "memory" not in layer:
            values.pop("memory", None)
        elif str(layer.get("memory", "no")).lower() in _YES and "data" not in layer:
            values.pop("data", None)
        values |= layer
        origins |= {name: places[name] for name in layer}
    return NodeOptions(**values, origins=origins)


def _from_file(path: Path, names: list[str]) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            found = {name.replace("-", "_"): value for name, value in tomllib.load(file).items()}
    except OSError as error:
        raise InvalidArguments(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArguments(f"{path}: {error}") from None
    unknown = sorted(set(found) - set(names))
    if unknown:
        raise InvalidArguments(f"{path}: there is no option {unknown[0]!r}; known are {', '.join(sorted(names))}")
    return found


def _converted(field: "dataclasses.Field[Any]", value: Any) -> Any:
    """The value in the type of its option; a bad one is named together with what would be good."""
    given, kind = value, cast(Any, field.type)
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    if value is None and kind in (str | None, int | None):
        return None
    if choices:
        good = value in choices
        wanted = " or ".join(choices)
    elif kind is bool:
        good = isinstance(value, bool) or str(value).lower() in (*_YES, *_NO)
        value, wanted = str(value).lower() in _YES, "true or false"
    elif kind is float or kind in (int, int | None):
        value = _number(value, float if kind is float else int)
        least, most = field.metadata["least"], field.metadata["most"]
        good = value is not None and least <= value <= most
        limit = f" to {most:g}" if most < NUMBER_MAX or (value or 0) > most else " or more"
        wanted = f"a {'number' if kind is float else 'whole number'}, {least:g}{limit}"
    else:
        good, wanted = isinstance(value, str | os.PathLike | int) and not isinstance(value, bool), "a text"
        value = os.fspath(value) if isinstance(value, os.PathLike) else str(value)
    if not good:
        raise InvalidArguments(f"{field.name} = {given!r}: it is {wanted}")
    return value


def _number(value: Any, kind: type[int] | type[float]) -> float | None:
    try:
        number = kind(value) if isinstance(value, str) else value
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            return None
        return kind(number) if number == kind(number) else None
    except (ValueError, OverflowError):  # no number, or one of hundreds of digits
        return None
