"""JSON over HTTP to one server: one persistent connection, with retries.

If the server is busy (429), not ready (502, 503, 504) or disconnects, the request is retried with growing pauses until
the time is up; ``Retry-After`` is respected. So all requests must be idempotent.
"""

import http.client
import json
import ssl
import time
from base64 import b64encode
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from upriver.errors import HttpRefused, OptionError, Unreachable

FOR_NOW: Final = (429, 502, 503, 504)
TIMEOUT_S: Final = 30.0
PATIENCE_S: Final = 120.0
PAUSE_S: Final = 0.1
PAUSE_MAX_S: Final = 5.0
#: The largest response.
ANSWER_MAX: Final = 64 * 1024 * 1024


class HttpRequests:
    """The server of a URL, whose path is the prefix of all paths."""

    def __init__(
        self, url: str, *, patience_s: float = PATIENCE_S, timeout_s: float = TIMEOUT_S,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        """``timeout_s`` limits one response, ``patience_s`` all attempts of a request together."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise OptionError("to", url, "it must be http://HOST:PORT/NAME or https://HOST:PORT/NAME")
        self.path = parts.path.rstrip("/")
        self.shown = f"{parts.scheme}://{parts.hostname}{'' if parts.port is None else f':{parts.port}'}{self.path}"
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._place = (parts.hostname, parts.port)
        self._headers = {"Accept": "application/json"}
        if parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._headers["Authorization"] = f"Basic {b64encode(login.encode()).decode()}"
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._sleep = sleep
        self._connection: http.client.HTTPConnection | None = None

    def ask(
        self, method: str, path: str, body: Any = None, *, accept: tuple[int, ...] = (), lines: bytes | None = None
    ) -> tuple[int, Any]:
        """The status and JSON of the response; an error status raises unless it is accepted."""
        data, kind = (lines, "application/x-ndjson") if lines is not None else (None, "application/json")
        if body is not None:
            data = json.dumps(body, ensure_ascii=False).encode()
        pause_s, deadline = PAUSE_S, time.monotonic() + self._patience_s
        while True:
            wait_s = pause_s
            try:
                status, headers, answer = self._exchange(method, self.path + path, data, kind)
            except (OSError, http.client.HTTPException) as error:
                self.close()
                failure: Exception = Unreachable(self.shown, str(error) or type(error).__name__)
            else:
                if status < 300 or status in accept:
                    return status, _parsed(answer)
                refused = HttpRefused(self.shown, method, path, status, answer[:500].decode(errors="replace"))
                if status not in FOR_NOW:
                    raise refused
                failure = Unreachable(self.shown, f"it returned status {status}: {refused.answer}")
                wait_s = max(pause_s, _seconds(headers.get("Retry-After", "")))
            if time.monotonic() + wait_s >= deadline:
                raise failure
            self._sleep(wait_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    def pause(self) -> None:
        """Pause before a retry."""
        self._sleep(10 * PAUSE_S)

    def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _exchange(self, method: str, path: str, data: bytes | None, kind: str) -> tuple[int, Any, bytes]:
        if self._connection is None:
            host, port = self._place
            assert host is not None
            if self._tls is None:
                self._connection = http.client.HTTPConnection(host, port, timeout=self._timeout_s)
            else:
                self._connection = http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=self._tls)
        headers = self._headers if data is None else self._headers | {"Content-Type": kind}
        self._connection.request(method, path or "/", data, headers)
        response = self._connection.getresponse()
        answer = response.read(ANSWER_MAX)
        if response.read(1):
            raise http.client.HTTPException(f"a response of more than {ANSWER_MAX} bytes")
        return response.status, response.headers, answer


def _parsed(answer: bytes) -> Any:
    if not answer:
        return None
    try:
        return json.loads(answer)
    except ValueError:
        raise http.client.HTTPException(f"the response is not JSON: {answer[:100]!r}") from None


def _seconds(text: str) -> float:
    return min(float(text), PAUSE_MAX_S) if text.isascii() and text.isdigit() else 0.0
