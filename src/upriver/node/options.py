"""The options of a node: from the command line, the environment, a TOML file, or a call.

Each option is declared once, as a field with its help. The command line shows them, ``UPRIVER_…`` variables and the
keys of the file bear the same names; the command line wins over the environment, the environment over the file.
"""

import dataclasses
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from upriver.errors import InvalidArguments
from upriver.model.vbucket import VBUCKETS_MAX
from upriver.wire.framing import BODY_BYTES_MAX

_UNITS: Final = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})


def option(default: Any, help_text: str) -> Any:
    """A field of ``NodeOptions`` with its help."""
    return dataclasses.field(default=default, metadata={"help": help_text})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """How to run a node."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(11210, "port to listen on; 0 picks a free one")
    data: str | None = option(None, "directory to keep the data in")
    memory: bool = option(False, "keep the data in memory only")
    bucket: str = option("default", "name of the bucket")
    vbuckets: int = option(VBUCKETS_MAX, "number of vbuckets, a power of two up to 1,024")
    initial_vbuckets: str = option(
        "all", "which vbuckets a new bucket makes active: all, none or ranges like 0-511,700"
    )
    ack: Literal["memory", "disk"] = option("memory", "answer writes when they are in memory or on disk")
    memory_quota: str = option("1GiB", "how much memory items may take; 0 for no limit")
    users: str | None = option(None, "file of the users; without one nobody has to authenticate")
    insecure: bool = option(False, "listen beyond loopback although there is no users file")
    tls_cert: str | None = option(None, "certificate chain in PEM form: serve TLS")
    tls_key: str | None = option(None, "private key of the certificate")
    metrics_port: int | None = option(None, "serve Prometheus metrics and /healthz on this port; 0 picks a free one")
    log_level: str = option("info", "debug, info, warning or error")
    log_format: Literal["plain", "json"] = option("plain", "form of the log lines")
    connections_max: int = option(20_000, "refuse further connections beyond so many")
    body_bytes_max: int = option(BODY_BYTES_MAX, "refuse larger requests")
    unread_bytes_max: int = option(1024 * 1024, "stop answering a peer that has so many bytes unread")
    idle_s: float = option(0.0, "close connections that are idle for so many seconds; 0 for never")

    def __post_init__(self) -> None:
        if self.data is None and not self.memory:
            object.__setattr__(self, "memory", True)
        if self.data is not None and self.memory:
            raise InvalidArguments("--data and --memory exclude each other")
        if (self.tls_cert is None) is not (self.tls_key is None):
            raise InvalidArguments("--tls-cert and --tls-key belong together")
        if self.host not in _LOOPBACK and self.users is None and not self.insecure:
            raise InvalidArguments(
                f"without a users file the node listens on loopback only, not on {self.host}: "
                "give --users FILE, or say --insecure"
            )
        parse_bytes(self.memory_quota)
        parse_ranges(self.initial_vbuckets, self.vbuckets)


def parse_bytes(text: str | int) -> int:
    """``1GiB``, ``500 MB`` or ``1024`` as a number of bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(text), re.IGNORECASE)
    if match is None or match[2].upper() not in _UNITS:
        raise InvalidArguments(f"{text!r} is no size: write 512MiB, 1GiB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_ranges(text: str, vbuckets: int) -> list[int]:
    """``all``, ``none`` or ``0-511,700`` as numbers of vbuckets."""
    if text == "all":
        return list(range(vbuckets))
    if text == "none":
        return []
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None or not int(match[1]) <= int(match[2] or match[1]) < vbuckets:
            raise InvalidArguments(f"{part!r} is no range of vbuckets below {vbuckets}: write all, none or 0-511,700")
        numbers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return sorted(numbers)


def gather(
    given: Mapping[str, Any], environment: Mapping[str, str] = os.environ, file: str | None = None
) -> NodeOptions:
    """The options that hold: what was given, else the environment's, else the file's, else the default."""
    fields = {field.name: field for field in dataclasses.fields(NodeOptions)}
    values: dict[str, Any] = {}
    if file is not None:
        values |= _from_file(Path(file), fields)
    for name in fields:
        variable = f"UPRIVER_{name.upper()}"
        if variable in environment:
            values[name] = environment[variable]
    values |= {name: value for name, value in given.items() if value is not None}
    if given.get("memory") and given.get("data") is None:
        values.pop("data", None)  # said on the command line, it overrides a directory from elsewhere
    return NodeOptions(**{name: _converted(name, value) for name, value in values.items()})


def _from_file(path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            found = {name.replace("-", "_"): value for name, value in tomllib.load(file).items()}
    except OSError as error:
        raise InvalidArguments(f"{path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidArguments(f"{path}: {error}") from None
    unknown = sorted(set(found) - set(fields))
    if unknown:
        raise InvalidArguments(f"{path}: there is no option {unknown[0]!r}; known are {', '.join(sorted(fields))}")
    return found


def _converted(name: str, value: Any) -> Any:
    """The value in the type of its option; a bad one is named together with what would be good."""
    default = next(field for field in dataclasses.fields(NodeOptions) if field.name == name)
    if "Literal" in str(default.type):
        allowed = getattr(default.type, "__args__", ())
        if value not in allowed:
            raise InvalidArguments(f"{name} = {value!r}: it is {' or '.join(allowed)}")
        return value
    wanted: type = bool if default.type is bool else int if "int" in str(default.type) else str
    if default.type is float:
        wanted = float
    if wanted is bool and isinstance(value, str):
        if value.lower() not in ("1", "0", "true", "false", "yes", "no"):
            raise InvalidArguments(f"{name} = {value!r}: it is true or false")
        return value.lower() in ("1", "true", "yes")
    try:
        return None if value is None else wanted(value)
    except ValueError:
        raise InvalidArguments(f"{name} = {value!r}: it is a number") from None
