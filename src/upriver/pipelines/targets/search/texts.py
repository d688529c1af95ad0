"""The searchable text of a document."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any, Final

#: A longer text is cut: the index only finds documents, and the node has them.
TEXT_MAX: Final = 1024 * 1024


def text_of(value: bytes) -> str:
    """The text of a value: the texts and numbers of a JSON document, else the value itself if it is text."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return ""
    if text[:1] in ("{", "["):
        with contextlib.suppress(ValueError, RecursionError):
            text = " ".join(_words(json.loads(text)))
    return text[:TEXT_MAX].encode(errors="replace").decode()


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for inner in value.values():
            yield from _words(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _words(inner)
    elif isinstance(value, str):
        yield value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield str(value)


def document_of(value: bytes) -> dict[str, Any] | None:
    """The JSON object of a value, or None."""
    try:
        document = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None
