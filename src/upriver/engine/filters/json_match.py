"""Compares a field of a JSON document with a value.

This module is also a program: a node runs it to judge large documents in a process of its own (``large_values``). It
imports only the standard library, so that it starts at once and stays small.
"""

import gc
import json
import pickle
import struct
import sys
from decimal import Decimal
from typing import Any, BinaryIO, Final

#: The sizes of the question and of the document, which follow.
SIZES: Final = struct.Struct(">II")
#: Path, wanted value, and whether the field has to contain it or to equal it.
Question = tuple[tuple[str, ...], Any, bool]


def matches(document: bytes, path: tuple[str, ...], wanted: Any, contains: bool) -> bool:
    """Whether the field at this path equals the wanted value, or contains it.

    A document that is nested too deeply to be parsed matches; one that is not JSON does not.
    """
    try:
        found = read_json(document)
    except RecursionError:
        return True
    except ValueError:
        return False
    for name in path:
        if not isinstance(found, dict) or name not in found:
            return False
        found = found[name]
    if not contains:
        return _equal(found, wanted)
    if isinstance(found, str):
        return isinstance(wanted, str) and wanted in found
    if isinstance(found, list):
        return any(_equal(each, wanted) for each in found)
    return isinstance(found, dict) and wanted in found


def read_json(document: bytes | str) -> Any:
    """Parse a document; integers with more digits than Python converts become decimals."""
    try:
        return json.loads(document)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:  # more digits than Python converts
        return json.loads(document, parse_int=Decimal)


def _equal(found: Any, wanted: Any) -> bool:
    """Compare as JSON does: 1.0 equals 1, but true does not, as it does in Python."""
    if isinstance(wanted, dict):
        return (
            isinstance(found, dict)
            and found.keys() == wanted.keys()
            and all(_equal(found[name], each) for name, each in wanted.items())
        )
    if isinstance(wanted, list):
        return isinstance(found, list) and len(found) == len(wanted) and all(map(_equal, found, wanted))
    return isinstance(found, bool) is isinstance(wanted, bool) and bool(found == wanted)


def answer_all(questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer questions, one byte for each, until there are no more."""
    while len(head := questions.read(SIZES.size)) == SIZES.size:
        question_bytes, document_bytes = SIZES.unpack(head)
        path, wanted, contains = pickle.loads(questions.read(question_bytes))
        answers.write(bytes([matches(questions.read(document_bytes), path, wanted, contains)]))
        answers.flush()


if __name__ == "__main__":
    gc.disable()  # a parsed document has no cycles, and looking for them would take most of the time
    answer_all(sys.stdin.buffer, sys.stdout.buffer)
