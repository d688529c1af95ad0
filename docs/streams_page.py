"""How streams work: the rules in prose, the life of a stream from the table that runs it, the settings from theirs."""

from collections.abc import Iterator

from docs.protocol_pages import page
from upriver.protocol.producer.controls import CONTROLS
from upriver.protocol.stream_state import TRANSITIONS, diagram

_OPENING = """\
A client becomes a consumer of the node with an [open](protocol/dcp.md#open-0x50), which names the connection. The name
appears in the statistics; opening it again closes the connection that had it before. An empty name is refused, and so
is one of more than 500 bytes; a second open, or anything of a stream before the first one, closes the connection. With
users configured the role *stream* is needed. Requests that have nothing to do with streams are answered as on every
other connection.

Which dialect a stream speaks follows from its request: 48 bytes of extras are `dcp`, 40 are `upr`. One connection may
hold both, one stream for each vbucket."""

_DRAFTS = """\
The drafts have no open: their first bytes tell them. A connection that begins with the byte 0x01 has the 12-byte header
and speaks [`upr_draft2`](protocol/upr_draft2.md); one whose first packet of a stream is a request 0x50 with 40 bytes of
extras, or 0x51 with none, speaks [`upr_draft3`](protocol/upr_draft3.md). [`upr_draft1`](protocol/upr_draft1.md) looks
like the second and is spoken where a listener is pinned to it:

    upriver serve --listen 127.0.0.1:11211,dialect=upr_draft1

In the statistics such a connection is named for where it comes from, as `\\upr_draft3:10.0.0.5:40112`. No open can take
that name: a backslash in one that was told appears doubled.

A listener may be pinned to any dialect, and then refuses the others with `EINVAL`. The two drafts with the short header
have no login: where users are configured they are served only on a listener that is pinned to them and marked
`anonymous`; elsewhere they get a request error and are closed.

A request is accepted with *ok* and nothing else, as drawn: the failover log has a request of its own, which in the
first two drafts may leave the vbucket out and then means that of the last stream request. A *stream start* follows,
then each snapshot between its *start* and its *end*. An unknown uuid is answered with a rollback to 0. Where only the
request id tells streams apart, one that is in use is refused. Refusals for which the first two drafts have no answer
are request errors (opcode 6: a status and a text); bytes that cannot be understood are answered with a decode error
(opcode 7: where they went wrong, and a text) and close the connection. `upr_draft1` has no flush: its stream just
ends, and the next request is rolled back. Only `upr_draft3` can hand a vbucket over. The group id of a stream, at
most 250 bytes, stands in the statistics."""

_ASKING = """\
The first of these that is not so decides the answer:

1. The vbucket is here, and active if the flag *active only* asks for that: else `NOT_MY_VBUCKET`. A replica or pending
   copy cannot be taken over either.
2. It has something to stream, because it was active once or has received a snapshot: else `ETMPFAIL`.
3. The start does not lie beyond the end and, on `dcp`, lies in its snapshot: else `ERANGE`.
4. There is no stream for it on this connection yet: else `KEY_EEXISTS`.
5. The consumer shares our history up to where it stands: else it is told to roll back. On `upr` an unknown uuid is
   `KEY_ENOENT`; there and in the drafts a start beyond everything is `ERANGE`.

Who starts at 0 never rolls back, unless *strict uuid* is set and the uuid is unknown. Who stands below the purge seqno
may have missed deletions and goes back to 0. An accepted request is answered with the failover log. Flags of a request
that the node does not know are ignored; `stream_V_flags` in the statistics shows what was asked for."""

_SNAPSHOTS = """\
A marker, then changes in which each key appears once, and so on. The first snapshot reaches at least what was the high
seqno at the request; later ones end where a checkpoint does, or where the history ends for now. A marker's start is the
last seqno *before* the snapshot.

Flags of a marker: 1 from memory, 2 from disk, 4 where a checkpoint begins, 8 if it wants an answer (in a takeover),
0x30 with the whole history. If the last changes of a snapshot did not pass a filter, `dcp` says with a
[seqno advanced](protocol/dcp.md#seqno-advanced-0x64) where the consumer stands; on `upr` the next marker does. A
document that stops passing a `value_filter` yields nothing else: the consumer keeps the last version that passed, and
only a deletion of the key is sent ([why](semantics.md#8-what-a-filter-does-not-tell)).

A stream ends with *ok* at its end seqno: on `upr` and the drafts with the state that was current there, on `dcp` with
the whole snapshot that holds it, unless the setting `exact_end` asks for the same. *To latest* ends at the high seqno
of the request, *disk only* at what was on disk; a *notifier* ends as soon as there is something to send,
whatever end it names. A changed
state, a flush (after a [flush](protocol/upr.md#flush-0x5a) message), a rollback and the deletion of the vbucket end it
too, and so does a history that it cannot follow any more.

The state at an end seqno may be gone, because compaction drops versions that were replaced, or may never have been
there, because a copy is whole only where the snapshots that it received ended. A request for such an end is refused
with *erange*: whoever asks without an end gets everything that there is."""

_PACE = """\
Streams take turns, so a large backfill does not hold up a live change elsewhere: who wakes up goes before those that
are busy, and a change that a write has just made is sent in the same turn of the event loop, right after the write
was answered. Nothing is read from the history before it can be sent: with `connection_buffer_size` not before the
consumer has acknowledged enough bytes, and never before the socket has taken what was sent before. The last packet
may exceed the window. A size of 0 lifts it and forgets what was not acknowledged. So a consumer that does not read
costs no more than one piece of 1 MiB, however much is written meanwhile.

What a filter looks at takes time too, whether it passes or not. So a turn also ends when filters have looked at 64 KiB,
a few milliseconds, maybe without anything to send; the next one goes on there when the others have had theirs.

Connections take turns too, of 1 MiB. With `set_priority` *low* a turn is a quarter as large, with *high*
twice as large, and so is the share beside others. With `backfill_order` *sequential* a connection finishes the
backfill of one stream before it begins the next, in the order of the requests; live changes of streams that have caught
up still go first."""

_TAKEOVER = """\
With the flag *takeover* a stream hands its vbucket over. It sends everything, tells the consumer to be *pending* and
goes on; when the backlog is small its own copy becomes *dead*, so that nobody writes any more. Writers that are faster
than the stream do not put this off for ever: when a round of sending what was there leaves no less than half of what
the last one left, it is time too. What had come in between follows, and only when the death is on disk and all markers
are answered is the consumer told to be *active*; when that is answered, and the answer remembered on disk, the stream
ends. The end seqno does not count. If the consumer is lost after the death, the vbucket stays dead: the other side may
be active already, and whoever moves vbuckets must ask it.

Nothing may be left out: with a filter, `keys_only` or the open flag *no value* a takeover is refused with `EINVAL`. The
consumer's answers name no vbucket, so takeovers of one connection need different opaques: else `KEY_EEXISTS`."""


_CONSUMING = """\
A connection that is opened without the flag *producer* makes the node a consumer: whoever opened it, a mover, says with
[add stream](protocol/upr.md#add-stream-0x51) which of its copies shall be fed, and passes on what the producer says.
With users configured this needs the role *admin* beside *stream*, because it writes and decides who is active. An
active vbucket, a dead one, and one that another stream feeds already, is refused.

Before its first stream the node sends its settings: a window of 10 MiB, noops, expirations as such. Then it asks with
48 bytes of extras and, refused with `EINVAL`, in `upr` with 40; there it first asks for the failover log and decides by
itself where it may go on. Told to roll back, it restores a whole state at or below that seqno and asks again. *Add
stream* is answered when the producer has answered: with its status, or with the opaque that the stream's messages bear.

Runs of changes go to the engine as they came. A change that is there already is answered with `ERANGE` and left out.
One that lies beyond its snapshot, or comes without one, ends the stream here, because something may be missing; so does
whatever the table below does not allow. What comes for a stream that is not, or no longer, there is answered with
`KEY_ENOENT`, and the mover takes that for the end of the stream. A copy that somebody makes active, if only for a
moment, takes no more of a stream that was asked for before: what it wrote itself must be rolled back first, and no
seqno need show it. Nor does one that is made dead or deleted. Except in a takeover, whose messages ask for themselves
who the copy is, the node then closes the stream at once, at the producer too, under the opaque of the stream: so the
mover knows although the source may be idle, and asks both sides anew. If the producer has not answered yet, *add
stream* is answered with `ETMPFAIL`; and so it is if the producer's answer, be it a rollback, is to a request from a
branch that the copy has left since. If the engine has no room the connection reads no more until there is. Processed
bytes are acknowledged after a fifth of the window, or after five seconds.

*Pending* and *active* are answered when they, and everything received before, are on disk. A copy becomes active only
from pending: if somebody has made it something else meanwhile, that stands."""

_MOVING = """\
A mover opens a connection of the producer type to the source and one of the consumer type to the destination, under one
name, and passes on everything but the answers to its own questions. Whenever both connections stand it asks both sides
who they are; to open the name has closed whatever an earlier connection had begun, so the answers stand.

| source | destination | what is done |
|---|---|---|
| any | active | it is taken over: have that confirmed from disk, push the new map, tell a source that died for it |
| active | not active | take over; nothing if it shall be undone |
| dead | pending | go on with the interrupted takeover; or undo it: active here, then replica there |
| dead | other | fail, for somebody else may have taken it over; if nobody has, an operator makes the source active |
| other | not active | fail: the source does not own it |
| active | active | fail, and touch nothing |

Takeovers that broke off while the source was active may have left other pending copies. So the source remembers, on
disk with its death, the name of the connection that it died for: a takeover of the dead copy under another name is
refused, and so is a mover of another name that wants to undo it. Movers between the same two nodes must bear one name,
and those between other nodes another. A source that knows that its successor is active refuses both under every name:
that one may have handed it on since. What a mover has asked may be otherwise a moment later, when others move the same
vbucket: at the destination it is refused to make an active copy a replica, or another one active. An operator may
overrule all this on a connection that is not opened for streams.

A mover may also replicate: it adds streams that hand nothing over, until it is stopped. A stream that ends, because of
a flush, a new branch or somebody who meddled with a copy, is asked for again after a pause of at most a second, once
both sides have said who they are. A stream that is refused for now (`ETMPFAIL`, `EBUSY`, `ENOMEM`) is asked for again
in the same way, in a takeover too; one that gets no further for the mover's patience, a minute, is given up.

If the destination cannot be reached a dead source stays dead. The new cluster map is pushed to both before the
destination's *active* is passed on, so whoever sees the old stream end finds the new owner."""


def streams_page() -> str:
    """The whole page."""
    return page(
        "# Streams",
        "How a node streams the changes of its vbuckets in `upr`, `dcp` and the three drafts before them. The messages"
        " themselves are on the pages of the [protocols](protocol/README.md).",
        "## Opening a connection",
        _OPENING,
        "## The drafts",
        _DRAFTS,
        "## Asking for a stream",
        _ASKING,
        "## What a stream sends",
        _SNAPSHOTS,
        "## The pace",
        _PACE,
        "## Taking over",
        _TAKEOVER,
        "## The node as a consumer",
        _CONSUMING,
        "## Moving a vbucket",
        _MOVING,
        "## Settings",
        "Sent with [control](protocol/dcp.md#control-0x5e), before the streams that they are meant for. An unknown name"
        " or value is refused with `EINVAL`.",
        "\n".join(_settings()),
        "## The life of a stream",
        "One table for both sides: the producer moves through it by what it sends, the consumer by what it receives,"
        " and what it does not allow is a violation.",
        f"```mermaid\n{diagram()}```",
        "\n".join(_transitions()),
    )


def _settings() -> Iterator[str]:
    yield "| name | default | meaning |"
    yield "|---|---|---|"
    for name, control in CONTROLS.items():
        default = str(control.default).lower() if isinstance(control.default, bool) else control.default
        yield f"| `{name}` | {'none' if default == '' else default} | {control.meaning} |"


def _transitions() -> Iterator[str]:
    yield "| state | event | next state |"
    yield "|---|---|---|"
    for state, events in TRANSITIONS.items():
        for event, target in events.items():
            yield f"| {state.value} | {event.value} | {target.value} |"
