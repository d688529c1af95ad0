"""The node's log: one line per event, plain or JSON.

Messages about a connection go through ``of_connection``, which adds the peer's address to the record. The log never
contains keys, values or passwords.
"""

import json
import logging
from collections.abc import MutableMapping
from datetime import UTC, datetime
from typing import IO, TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


class ConnectionLog(_Adapter):
    """A log whose lines name one connection."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**(self.extra or {}), **(kwargs.get("extra") or {})}
        return msg, kwargs


def of_connection(log: logging.Logger, peer: str) -> ConnectionLog:
    """Return the log of a connection. It is created on use, so that idle connections cost nothing."""
    return ConnectionLog(log, {"connection": peer})


class PlainFormatter(logging.Formatter):
    """Time, level, connection and message in one line, and the traceback of an internal error."""

    def format(self, record: logging.LogRecord) -> str:
        connection = getattr(record, "connection", "")
        where = f"{connection}: " if connection else ""
        line = f"{_time(record)} {record.levelname:<7} {where}{_one_line(record.getMessage())}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, and connection and exception if there are any."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {"time": _time(record), "level": record.levelname.lower(), "logger": record.name}
        if connection := getattr(record, "connection", ""):
            entry["connection"] = connection
        entry["message"] = record.getMessage()
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def set_up_logs(level: str, form: Literal["plain", "json"], stream: IO[str]) -> None:
    """Write everything that this process logs to one stream."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if form == "json" else PlainFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _one_line(message: str) -> str:
    """Escape line breaks, so that text from a peer cannot look like a log line."""
    return message.replace("\r", "\\r").replace("\n", "\\n")
