"""The node's log: one line an event, plain or JSON, that names the connection.

What is logged about a connection goes through ``of_connection``, which puts the peer's address into the record; the
forms show it in its own place. Nobody logs keys, values or passwords.
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
    """The log of the connection with a peer. Made when there is something to say: idle connections cost nothing."""
    return ConnectionLog(log, {"connection": peer})


class PlainFormatter(logging.Formatter):
    """Time, level, connection and message; never more than one line unless something of ours failed."""

    def format(self, record: logging.LogRecord) -> str:
        connection = getattr(record, "connection", "")
        where = f"{connection}: " if connection else ""
        line = f"{_time(record)} {record.levelname:<7} {where}{_one_line(record.getMessage())}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, connection if there is one, message, exception if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {"time": _time(record), "level": record.levelname.lower(), "logger": record.name}
        if connection := getattr(record, "connection", ""):
            entry["connection"] = connection
        entry["message"] = record.getMessage()
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def set_up_logs(level: str, form: Literal["plain", "json"], stream: IO[str]) -> None:
    """Send everything that this process logs to one stream."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if form == "json" else PlainFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _one_line(message: str) -> str:
    """Line breaks in what a peer sent must not look like lines of ours."""
    return message.replace("\r", "\\r").replace("\n", "\\n")
