"""The printed examples with errors: printed bytes, bytes on the wire, and the result of decoding the printed ones."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from docs.examples import vectors
from docs.inserts import filled
from docs.protocol_pages import fenced, sentence, table
from upriver.errors import WireError
from upriver.wire import DIALECTS, Dialect
from upriver.wire.explain import Explanation, explain, explain_packet

PAGE = Path(__file__).parent / "protocol" / "errata.md"


def errata_page() -> str:
    """The decisions, written by hand, and every printed example that is wrong."""
    wrong = [
        (DIALECTS[name], vector) for name, file in vectors().items() for vector in file["vectors"] if _is_wrong(vector)
    ]
    total = sum(len(file["vectors"]) for file in vectors().values())
    examples = (
        f"The texts print {total} packets; {len(wrong)} of them have an error.",
        *(block for dialect, found in groupby(wrong, key=lambda pair: pair[0]) for block in _section(dialect, found)),
    )
    return filled(PAGE, {"printed examples": "\n\n".join(examples)})


def _is_wrong(vector: dict[str, Any]) -> bool:
    return bool(vector["errata"] or vector["wrong_fields"])


def _section(dialect: Dialect, found: Iterator[tuple[Dialect, dict[str, Any]]]) -> Iterator[str]:
    yield f"## Printed in {dialect.name}"
    for _, vector in found:
        yield from _erratum(dialect, vector)


def _erratum(dialect: Dialect, vector: dict[str, Any]) -> Iterator[str]:
    line = vector["id"].partition(":")[2]
    yield f"### Line {line}: {_name(dialect, vector)}"
    yield "\n".join(f"* {sentence(each)}" for each in _mistakes(vector))
    if vector["wire"] is not None and vector["wire"] != vector["printed"]:
        yield table(("field", "bytes", "printed", "on the wire"), _differences(dialect, vector))
    yield fenced(_both(vector["printed"], vector["wire"]))
    yield f"Decoding the printed bytes: {_outcome(dialect, bytes.fromhex(vector['printed']))}"


def _both(printed: str, wire: str | None) -> str:
    if printed == wire:
        return f"printed and sent  {printed}"
    return f"printed  {printed}\nsent     {wire or '(never)'}"


def _name(dialect: Dialect, vector: dict[str, Any]) -> str:
    if vector["wire"] is None:
        return str(vector["lead"])
    return explain_packet(bytes.fromhex(vector["wire"]), dialect).message


def _mistakes(vector: dict[str, Any]) -> Iterator[str]:
    yield from vector["errata"]
    if vector["wrong_fields"]:
        yield f"misprinted in the list of fields: {', '.join(vector['wrong_fields'])}"


def _differences(dialect: Dialect, vector: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The fields whose printed bytes differ from the sent ones."""
    printed, wire = bytes.fromhex(vector["printed"]), bytes.fromhex(vector["wire"])
    for span in explain_packet(wire, dialect).fields:
        was, now = (data[span.first : span.last + 1].hex() for data in (printed, wire))
        if was != now:
            yield (
                span.name,
                f"{span.first}-{span.last}" if span.last > span.first else f"{span.first}",
                f"`{was}`",
                f"`{now}`",
            )


def _outcome(dialect: Dialect, printed: bytes) -> str:
    """The result of decoding these bytes."""
    found: list[Explanation] = []
    try:
        found.extend(explain(printed, dialect))
    except WireError as error:
        if not found:
            return f"refused {error}."
        return f"the first {found[0].length} of them are accepted as {found[0].message}, then refused {error}."
    return f"accepted as {found[0].message}."
