"""The errata of the texts: what is printed, what goes over the wire, and what a decoder makes of the printed bytes."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from docs.examples import vectors
from docs.protocol_pages import fenced, page, sentence, table
from upriver.errors import WireError
from upriver.wire import DIALECTS, Dialect
from upriver.wire.explain import Explanation, explain, explain_packet

#: Where, what is contradictory or missing, and what we do about it.
_DECISIONS = (
    (
        "all",
        "The lengths in many diagrams do not match their bytes, and some field lists differ from their diagram.",
        "Lengths that we send are consistent; inconsistent ones are refused.",
    ),
    (
        "upr",
        "The rollback answer must not have extras, yet is drawn with 8 bytes of them.",
        "Sent in the extras, as drawn, and taken from extras or value. `dcp` sends it in the value.",
    ),
    (
        "upr",
        "State 2 is pending and 3 replica; in TAP and the memcached commands it is the other way round.",
        "Each dialect keeps its own codes; the model has names. `dcp` numbers them like `upr`, as deployed servers do.",
    ),
    (
        "upr",
        "An unknown vbucket uuid is answered with key enoent, and elsewhere with a rollback.",
        "`upr` answers key enoent, `dcp` a rollback to 0.",
    ),
    (
        "upr",
        "The start of a stream must be less than its end.",
        "Equal is allowed: the request is accepted and the stream ends at once, as with deployed servers.",
    ),
    (
        "upr",
        "Set vbucket state has no reply.",
        "It is answered, and the answer is waited for: a takeover is not safe without it. Deployed servers do so, too.",
    ),
    ("upr", "The answer to add stream speaks of a vbucket in its extras.", "Only the opaque is there."),
    (
        "upr",
        "Stream end reason 1 is a changed state, a mutation has 30 bytes of extras; early builds sent 2, and 31 bytes.",
        "Sent as the text says; both are taken.",
    ),
    (
        "upr",
        "After a close, a message for that vbucket may still arrive.",
        "The consumer answers it with key enoent, which lets the producer know.",
    ),
    (
        "upr_draft3",
        "Extras length 36 for 28 bytes of fields; set vbucket state with the magic of a response; not my vbucket as "
        "status 1 and as 7.",
        "28 is right; 0x80 is sent and 0x81 taken, too; 7 is sent.",
    ),
    (
        "upr_draft1, upr_draft2",
        "A mutation has a key and a value, and no key length.",
        "It stands in the header's reserved bytes 2-3. A mutation with 0 there is refused with a clear error.",
    ),
    (
        "upr_draft1, upr_draft2",
        "The failover log request names no vbucket.",
        "A reserved byte and the vbucket may follow the type. Without them the vbucket of the last stream request is "
        "meant, and if there was none the answer is not my vbucket.",
    ),
    (
        "upr_draft1, upr_draft2",
        "Opcodes 5, 6 and 7 have no body.",
        "5 holds a reason as in `upr_draft3`; 6, a refused request, a status and a text; 7, bytes that were not "
        "understood, their offset and a text, and the connection is closed.",
    ),
    (
        "upr_draft1",
        "The stream messages are unfinished; a deletion lists no lock time; there is no flush.",
        "Framed as in `upr_draft2`; no lock time in a deletion; no flush.",
    ),
    (
        "upr_draft1, upr_draft2, upr_draft3",
        "A deletion and an expiration have an item expiration, drawn as 0; what is gone expires no more.",
        "It is the second of the deletion, as where the metadata of a deleted key is asked for or given: so a copy "
        "can keep its tombstones as long as the source.",
    ),
    (
        "upr, upr_draft2",
        "An expiration is a message of its own; early servers sent a deletion.",
        "Every UPR dialect sends an expiration. `tap` and plain `dcp` send a deletion.",
    ),
    (
        "tap",
        "Keys-only is a preference, and servers ignored it.",
        "Honoured: no value, and the flag *no value*.",
    ),
    (
        "tap",
        "A registered client pins memory until the server runs out of it.",
        "A cursor never pins memory: a slow one is served from disk.",
    ),
    (
        "tap",
        "A dump left out what was not yet on disk, and a backfill repeated items.",
        "A dump is complete, and no change is sent twice without a reconnect.",
    ),
    (
        "tap",
        "Checkpoint messages are drawn with the id as engine-private data of length 4; deployed servers send 16 bytes "
        "of extras, a name as key and the id as value.",
        "Sent as drawn, with length 8; both are taken.",
    ),
    (
        "tap",
        "Clients send flags that are not in the text: 0x40 with a list of checkpoints, 0x100 for the byte order.",
        "Both are taken. Item flags always go out in network order; with 0x100 a flag of the message says so.",
    ),
    (
        "tap",
        "A registered client has no extra data; Couchbase's tools send a byte that asks for closed checkpoints only, "
        "and leave out the list of checkpoints when they have none.",
        "Both forms are taken. The byte is read and not followed: *open checkpoint* tells where a client may stop.",
    ),
)


def errata_page() -> str:
    """Every printed example that is wrong, and every contradiction that had to be decided."""
    wrong = [
        (DIALECTS[name], vector) for name, file in vectors().items() for vector in file["vectors"] if _is_wrong(vector)
    ]
    total = sum(len(file["vectors"]) for file in vectors().values())
    return page(
        "# Errata",
        f"The texts print {total} packets. {len(wrong)} of them have an error, in the diagram or the list of fields. "
        "This page shows each of them: what is printed, what goes over the wire, and what happens when the printed "
        "bytes are decoded, which is found out by decoding them. Line numbers are those of the texts. "
        "Before that, the contradictions in the prose.",
        "## What we decided",
        table(
            ("dialect", "the text", "we"),
            ((f"`{where}`" if where != "all" else where, *rest) for where, *rest in _DECISIONS),
        ),
        *(block for dialect, found in groupby(wrong, key=lambda pair: pair[0]) for block in _section(dialect, found)),
    )


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
    """The fields whose bytes are printed otherwise than they are sent."""
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
    """What a decoder does with these bytes: computed, not claimed."""
    found: list[Explanation] = []
    try:
        found.extend(explain(printed, dialect))
    except WireError as error:
        if not found:
            return f"refused {error}."
        return f"the first {found[0].length} of them are taken as {found[0].message}, then refused {error}."
    return f"taken as {found[0].message}."
