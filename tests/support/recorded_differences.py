"""Where we answer otherwise than the recorded servers did, and why we want to.

Beside these, four things are left out of every comparison: the words of a refusal (ours say what was wrong, so none is
empty), `nru` (how recently an item was used, which we do not tell), the byte that the builds of 2014 had for it, and
the ids of checkpoints, which those servers began to count elsewhere.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from upriver.wire import AnyResponse, Message
from upriver.wire.codes import Status


@dataclass(frozen=True)
class Difference:
    """Lines of one vbucket on one recorded connection: ``-`` was recorded, ``+`` is ours."""

    recording: str
    connection: str
    vbucket: int | None
    lines: tuple[str, ...]
    why: str


def wanted(differences: Iterable[Difference], recording: str) -> dict[tuple[str, int | None], list[str]]:
    """Those of one recording, by connection and vbucket, as a replay tells them."""
    return {(each.connection, each.vbucket): list(each.lines) for each in differences if each.recording == recording}


def check_reasons(differences: Iterable[Difference], recordings: Iterable[str]) -> None:
    """Each has its reason, and belongs to a recording."""
    for difference in differences:
        assert difference.why.endswith("."), difference
        assert difference.recording in recordings, difference


def check_refusals(messages: Iterable[Message]) -> None:
    """Every refusal says why."""
    for message in messages:
        if isinstance(message, AnyResponse) and message.status is not Status.SUCCESS:
            assert message.text, message


DIFFERENCES = (
    Difference(
        "dcp_06_errors",
        "q",
        7,
        ("- 0x53 einval", "+ 0x53 success, log [0]", "+ stream 0", "+ stream end 0"),
        "A stream request of 40 bytes is `upr`, which that server no longer spoke; from 0 to 0 it ends at once "
        "(docs/semantics.md).",
    ),
    Difference(
        "dcp_09_state_change",
        "ctl",
        17,
        ("- 0x3f success", "+ 0x3f einval"),
        "No text asks for it; we want it (docs/architecture.md): an active vbucket is not deleted by accident, it must "
        "be dead first. The stream ends then, with the same reason.",
    ),
    Difference(
        "dcp_09_state_change",
        "ctl",
        0,
        ("- 0x08 not_supported", "+ 0x08 success"),
        "Flush was switched off on that server.",
    ),
    Difference(
        "dcp_09_state_change",
        "p",
        18,
        ("+ flush", "+ stream end 2"),
        "So there was none to tell: open streams get the flush message, then stream end.",
    ),
    Difference(
        "dcp_14_backfill_disk",
        "p",
        25,
        ("- whole at 7, flags 0x1 0x2", "+ whole at 7, flags 0x1 0x5"),
        "That server drops closed checkpoints from memory and reads them from disk; ours still holds them.",
    ),
    Difference(
        "dcp_14_backfill_disk",
        "q",
        25,
        ("- whole at 7, flags 0x2", "+ whole at 7, flags 0x1"),
        "The same: from memory.",
    ),
    Difference(
        "dcp_14_backfill_disk",
        "r",
        25,
        ("- whole at 7, flags 0x2", "+ whole at 7, flags 0x5"),
        "The same: from memory.",
    ),
    Difference(
        "upr2014_01_stream_memory",
        "p",
        2,
        (
            "- mutation 1 rev 1 flags efbeadde lock 0 a=1",
            "+ mutation 1 rev 1 flags deadbeef lock 0 a=1",
            "- deletion 6 rev 2 e",
            "+ expiration 6 rev 2 e",
            "+ mutation 1 rev 1 flags deadbeef lock 0 a=1",
            '+ mutation 2 rev 1 flags 0 lock 0 b={"j":2}',
        ),
        "Item flags go out in network order; every UPR dialect tells an expiration; and a stream that ends "
        "at 3 holds the state that was current at 3, because a consumer takes its end for a consistent state. "
        "The early build left out what had been superseded since.",
    ),
    Difference(
        "upr2014_03_state_takeover",
        "p",
        0,
        ("- 0x5e not_supported", "+ 0x5e success", "- 0x5d einval", "- 0x5d success", "- 0x5d success"),
        "Noops can be switched on, an unknown setting is an invalid argument, and a buffer acknowledgement, which is "
        "taken in both forms, gets no answer.",
    ),
    Difference(
        "upr2014_03_state_takeover",
        "p",
        31,
        ("- stream end 2", "+ stream end 1"),
        "The text says 1 for a changed state.",
    ),
    Difference(
        "upr2014_03_state_takeover",
        "p",
        33,
        ("+ mutation 5 rev 1 flags 0 lock 0 key4=valuevalue",),
        "The acknowledgement that the early build refused counts, so there is room for one packet more.",
    ),
)

_BRANCH = "A copy that becomes active starts its own branch, also after a takeover; the source's log is kept below it."
_NO_TAKEOVER = (
    "Only a stream that was added as a takeover changes the role of the copy: else two nodes could be active."
)
_EXPIRATIONS = (
    "We also ask to be told expirations as such, with `enable_expiry_opcode`, which that server did not know."
)

#: The same where the recorded server consumed.
CONSUMER_DIFFERENCES = (
    Difference("cons_01_add_stream", "k", 0, ("+ control",), _EXPIRATIONS),
    Difference(
        "cons_01_add_stream",
        "ctl",
        41,
        ("- 0x3e success, state 1", "+ 0x3e success, state 2"),
        _NO_TAKEOVER,
    ),
    Difference(
        "cons_01_add_stream",
        "k",
        41,
        ("- 0x5b success", "- 0x5b success", "+ 0x5b einval", "+ 0x5b einval", "+ 0x5a key_enoent"),
        f"{_NO_TAKEOVER} After a close a message for that vbucket is answered, to let the producer know.",
    ),
    Difference("cons_01_add_stream", "k", None, ("- closed",), "So the connection need not be closed for it."),
    Difference("cons_03_relay_takeover", "consB", 0, ("+ control",), _EXPIRATIONS),
    Difference("cons_03_relay_takeover", "qB", 34, ("- 0x54 success, log [0]", "+ 0x54 success, log [6, 0]"), _BRANCH),
    Difference("cons_03_relay_takeover", "qB2", 34, ("- 0x53 success, log [0]", "+ 0x53 success, log [6, 0]"), _BRANCH),
)
