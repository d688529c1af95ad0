"""The node's log: one line per event, plain or JSON.

Messages about a connection go through ``of_connection``, which adds the peer's address to the record. The log never
contains keys, values or passwords.

Peers can cause messages, thousands in a second. So of each kind of message about connections the log has a few in a
minute, and then the number of those that were left out. Messages of one kind differ only in numbers and quoted names.
"""

import json
import logging
import re
from collections.abc import Callable, MutableMapping
from datetime import UTC, datetime
from typing import IO, TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


#: Of each kind of message about connections, this many lines are written in this time.
LINES_MAX: Final = 20
LINES_S: Final = 60.0
#: With more kinds than this, those with the same text before its arguments are filled in are one.
KINDS_MAX: Final = 100
#: The parts of a message in which messages of one kind differ.
_VARYING: Final = re.compile(r"'[^']*'|\"[^\"]*\"|0x[0-9a-f]+|\d[\d.,:]*")


class RepeatLimit:
    """Limits the messages that peers can cause, by their kind."""

    __slots__ = ("_kinds", "_log", "_ticks")

    def __init__(self, log: logging.Logger, ticks: Callable[[], float]) -> None:
        self._log = log
        self._ticks = ticks
        #: For each kind, when its time began and how many messages came since.
        self._kinds: dict[tuple[int, str], tuple[float, int]] = {}

    def admits(self, level: int, text: str, args: tuple[object, ...]) -> bool:
        """Whether to write this message. Debug messages are always written."""
        if level <= logging.DEBUG:
            return True
        now, kind = self._ticks(), _VARYING.sub("…", text % args if args else text)
        if len(self._kinds) >= KINDS_MAX and (level, kind) not in self._kinds:
            kind = text
        since, count = self._kinds.get((level, kind), (now, 0))
        if now - since >= LINES_S:
            self._tell(level, kind, count)
            since, count = now, 0
        self._kinds[level, kind] = since, count + 1
        return count < LINES_MAX

    def report(self, *, at_end: bool = False) -> None:
        """Write how many messages were left out, of each kind whose time is over; ``at_end``, of all kinds."""
        now = self._ticks()
        for (level, kind), (since, count) in list(self._kinds.items()):
            if at_end or now - since >= LINES_S:
                del self._kinds[level, kind]
                self._tell(level, kind, count)

    def _tell(self, level: int, kind: str, count: int) -> None:
        if count > LINES_MAX:
            self._log.log(level, "%d more messages were left out, all like this: %s", count - LINES_MAX, kind)


class ConnectionLog(_Adapter):
    """A log whose lines name one connection."""

    def __init__(self, log: logging.Logger, extra: dict[str, object], limit: RepeatLimit | None = None) -> None:
        super().__init__(log, extra)
        self._limit = limit

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Write a message, unless there were too many of its kind."""
        if self.isEnabledFor(level) and (self._limit is None or self._limit.admits(level, str(msg), args)):
            super().log(level, msg, *args, **kwargs)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**(self.extra or {}), **(kwargs.get("extra") or {})}
        return msg, kwargs


def of_connection(log: logging.Logger, peer: str, limit: RepeatLimit | None = None) -> ConnectionLog:
    """Return the log of a connection. It is created on use, so that idle connections cost nothing."""
    return ConnectionLog(log, {"connection": peer}, limit)


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
