"""Moving vbuckets from one node to another: the steps, without I/O.

Theory of operation. A mover holds two connections, one of the producer type to the source and one of the consumer type
to the destination, and passes on what the two say to each other (``relay``). It tells the destination which streams to
add; the takeover itself is a matter between the two (docs/semantics.md). What is left to the mover is to know how it
ended, whatever fails.

Nothing is remembered across a cut. Whenever both connections stand, every vbucket that is not done begins with the same
question to both sides: who is what? To open a connection closes the one that had its name before, together with all
that was on its way there; so the answer stands, and nobody but this mover can change it. (Movers between the same two
nodes must therefore bear the same name; and those between others another, because a source that dies remembers under
which name, and lets no other mover go on with the takeover or undo it.) Then follows:

============  ===========  =============================================================
source        destination  what is done
============  ===========  =============================================================
whatever      active       it is taken over: have that confirmed from disk, push the map,
                           tell a source that died for it
active        not active   take over; or, if it shall be undone, nothing is left to do. A
                           dead destination may be all that another takeover has left: it
                           is fed only if the source holds everything that it does
dead          pending      a takeover was interrupted: go on with it, or undo it, first
                           active here, then replica there
dead          another, or  failed: it may have been taken over and handed on, and nobody
              no copy      knows to whom
other         not active   the source does not own the vbucket: failed
active        active       somebody else has meddled: failed, and nothing is touched
============  ===========  =============================================================

What a source died for is gone on with, or undone, only if the destination was never active since. It was not if it is
pending, under a branch that the source knows: a copy is pending on disk before the source dies, and no longer once it
has another role, or is fed by somebody on another branch. (The failover logs of two copies alone do not tell: one that
was active, and is a replica again, may be fed by one that knows nothing of it.) And a source that has heard how it
ended refuses.
If the destination cannot be reached a dead source stays dead: the other side may be active. A source that is still
active has sent nothing that could make the destination active, so there nothing needs to be undone.

Replication goes on until it is stopped. A stream that ends, because the source was flushed or somebody meddled with
either copy, is asked for again after a while, and again both sides are asked first. So is one that is refused for now,
whatever the goal; how often is up to whoever runs the mover.

When the destination has answered *active* the mover pushes the new map to both before it passes the answer on, which
ends the stream: who looks for the new owner then finds it. So it is with a source that has to be told because that
answer was lost: the map waits for no disk of an owner that was.
"""

import copy
import enum
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from upriver.errors import WireError
from upriver.model import VbucketState
from upriver.protocol.move.relay import PacketSplitter, decoded, is_for_mover
from upriver.wire import Buffer, Request, Response, Status, dcp, memcached, upr

#: A takeover that breaks off for a reason other than a lost connection is begun so often.
ATTEMPTS_MAX: Final = 3

_CLOSE_STREAM: Final = upr.CloseStream.declaration.opcode
_SET_STATE: Final = upr.SetVbucketState.declaration.opcode
#: What belongs to a stream; refused with KEY_ENOENT if the destination has left it.
_OF_STREAM: Final = frozenset(
    message.declaration.opcode
    for message in (dcp.SnapshotMarker, dcp.Mutation, dcp.Deletion, dcp.Expiration, dcp.SeqnoAdvanced, upr.Flush)
)


class Link(enum.Enum):
    """One of the two connections."""

    SOURCE = "source"
    DESTINATION = "destination"


class Goal(enum.Enum):
    """What shall become of a vbucket."""

    REPLICATE = "replicate"
    TAKE_OVER = "take over"
    UNDO = "undo"


class Phase(enum.Enum):
    """How far a vbucket is."""

    WAITING = "waiting for the connections"
    ASKING = "asking both sides who they are"
    PREPARING = "preparing the destination"
    STREAMING = "streaming"
    RESTING = "resting before the stream is asked for again"
    ANNOUNCING = "pushing the new map"
    ENDING = "waiting for the source to remember that it is over"
    CONFIRMING = "having the destination's state confirmed"
    UNDOING = "making the source active again"
    MOVED = "moved"
    UNDONE = "undone"
    FAILED = "failed"

    @property
    def over(self) -> bool:
        """Nothing more happens."""
        return self in (Phase.MOVED, Phase.UNDONE, Phase.FAILED)


@dataclass(frozen=True, slots=True)
class Connect:
    """Connect to this side and say ``connected``, or ``lost`` if that fails; not before some time after a loss."""

    link: Link


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close the connection to this side; it is not ``lost`` then."""

    link: Link


@dataclass(frozen=True, slots=True)
class Send:
    """Send these bytes."""

    link: Link
    data: Buffer


@dataclass(frozen=True, slots=True)
class Announce:
    """Push this map to all other nodes and say ``announced``, whether or not they took it."""

    vbucket: int
    encoded: bytes


@dataclass(frozen=True, slots=True)
class Rest:
    """Wait a while, longer each time, and say ``rested``: a stream that shall go on has ended or was refused."""

    vbucket: int


Action = Connect | Disconnect | Send | Announce | Rest
#: Refusals of a stream that may be another answer in a while.
_FOR_NOW: Final = frozenset({Status.ETMPFAIL, Status.EBUSY, Status.ENOMEM})
#: Refusals of an open that would be the same next time.
_FINAL: Final = frozenset({Status.AUTH_ERROR, Status.EACCESS, Status.UNKNOWN_COMMAND, Status.NOT_SUPPORTED})


class Move:
    """One vbucket on its way."""

    def __init__(self, vbucket: int, goal: Goal) -> None:
        self.vbucket = vbucket
        self.goal = goal
        self.phase = Phase.WAITING
        #: Why it failed, or what it is waiting for.
        self.reason = ""
        #: Why its stream is refused for now; empty once one is accepted.
        self.refusal = ""
        self.attempts = 0
        #: Who is what, as far as was answered since the connections stand; None for no such vbucket.
        self.states: dict[Link, VbucketState | None] = {}
        #: What the source hears when the map is pushed: the answer to *active*, or that it shall stay dead.
        self.held: bytes = b""
        #: The state that the source has told the destination to take on, until that is answered.
        self.told: upr.VbucketState | None = None
        #: The map that is being pushed, and where it has not arrived yet: None stands for all other nodes.
        self.announcement: bytes = b""
        self.unannounced: set[Link | None] = set()


def _set_vbucket(move: Move, state: VbucketState) -> Request:
    return memcached.SetVbucket(vbucket=move.vbucket, state=memcached.VbucketState[state.name])


class MoverSteps:
    """Moves vbuckets from one node to another, over one pair of connections."""

    def __init__(
        self,
        name: str,
        vbuckets: Iterable[int],
        goal: Goal = Goal.TAKE_OVER,
        *,
        new_map: Callable[[int], bytes] | None = None,
        has_others: bool = False,
        on_phase: Callable[[Move], object] | None = None,
    ) -> None:
        """``new_map`` gives the cluster map to push once a vbucket is taken over; to others too if there are any."""
        self.name = name
        self.moves = {vbucket: Move(vbucket, goal) for vbucket in vbuckets}
        self.new_map = new_map
        self.has_others = has_others
        self.on_phase = on_phase
        self.bytes_passed_on = 0
        self._actions: deque[Action] = deque()
        self._open: set[Link] = set()
        self._splitters: dict[Link, PacketSplitter] = {}
        #: Questions by link and opaque: what to do with the answer.
        self._questions: dict[tuple[Link, int], Callable[[Response], object]] = {}
        self._opaque = 0
        #: Questions to the destination that came up in the middle of a change: they go behind it.
        self._behind: list[bytes] = []
        #: Who waits for the answer that tells how far the dead copies are.
        self._dead_asked: list[tuple[Move, Callable[[int], object]]] = []
        #: Takeovers by the opaque of their stream.
        self._by_opaque: dict[int, Move] = {}
        #: The opaques of streams that the destination has left: what the source says of them is no news.
        self._left: set[int] = set()
        #: Streams were added on these connections.
        self._begun = False

    # What the shell does and tells

    def start(self) -> None:
        """Begin: connect to both sides."""
        for link in Link:
            self._actions.append(Connect(link))

    def actions(self) -> list[Action]:
        """What is to be done now, in this order; each is given once."""
        actions = list(self._actions)
        self._actions.clear()
        return actions

    @property
    def over(self) -> bool:
        """Nothing is left to do. Replication goes on until it is stopped."""
        return all(move.phase.over for move in self.moves.values())

    def connected(self, link: Link) -> None:
        """A connection stands: take the name, and with it end whatever an earlier connection had begun."""
        self._splitters[link] = PacketSplitter()
        flags = dcp.OpenFlag.PRODUCER if link is Link.SOURCE else dcp.OpenFlag.CONSUMER
        self._ask(link, dcp.Open(name=self.name.encode(), flags=flags), lambda answer: self._opened(link, answer))

    def lost(self, link: Link, why: str = "") -> None:
        """A connection is gone, or did not come about. If streams had begun on the two, both begin again."""
        if self.over:
            return
        other = Link.DESTINATION if link is Link.SOURCE else Link.SOURCE
        if self._begun and other in self._splitters:
            self._actions.append(Disconnect(other))
        lost = set(Link) if self._begun else {link}
        self._forget(lost)
        for move in self._unfinished():
            self._set(move, Phase.WAITING, f"the {link.value} cannot be reached{why and ': '}{why}")
        for each in Link:
            if each in lost:
                self._actions.append(Connect(each))
        self._ask_source_alone()

    def undo(self, vbucket: int) -> None:
        """Take a takeover back, as far as that is still possible: everything begins again, under that goal."""
        move = self.moves[vbucket]
        if move.phase.over:
            return
        move.goal = Goal.UNDO
        for link in list(self._splitters):
            self._actions.append(Disconnect(link))
        self._forget(set(Link))
        for each in self._unfinished():
            self._set(each, Phase.WAITING)
        self.start()

    def _forget(self, links: set[Link]) -> None:
        """These connections are no more; nothing that was asked on either counts."""
        self._open -= links
        for link in links:
            self._splitters.pop(link, None)
        self._questions = {
            question: then
            for question, then in self._questions.items()
            if question[0] not in links and question[0] not in self._open  # its open is still awaited
        }
        self._behind.clear()
        self._by_opaque.clear()
        self._left.clear()
        self._dead_asked.clear()
        self._begun = False
        for move in self._unfinished():
            move.states.clear()
            move.held, move.told = b"", None
            move.announcement = b""
            move.refusal = ""

    def received(self, link: Link, data: Buffer) -> None:
        """Bytes came: pass them on, except what is for the mover. They are only lent until the actions are taken."""
        splitter = self._splitters.get(link)
        if splitter is None:
            return
        other = Link.DESTINATION if link is Link.SOURCE else Link.SOURCE
        try:
            for piece, is_packet in splitter.split(data):
                if not is_packet or self._look_at(link, bytes(piece)):
                    self.bytes_passed_on += len(piece)
                    self._actions.append(Send(other, piece))
                if self._behind and link is Link.SOURCE and not splitter.in_change:
                    self._actions += (Send(other, question) for question in self._behind)
                    self._behind.clear()
        except WireError as error:
            self._actions.append(Disconnect(link))
            self.lost(link, str(error))

    def _look_at(self, link: Link, packet: bytes) -> bool:
        """Look at a packet; whether it is to be passed on."""
        if is_for_mover(packet):
            answer = decoded(packet)
            assert isinstance(answer, Response)
            question = self._questions.pop((link, answer.opaque), None)
            if question is not None:
                question(answer)
            return False
        if link is Link.SOURCE:
            return self._look_at_producer(packet)
        return self._look_at_consumer(packet)

    # Opening

    def _opened(self, link: Link, answer: Response) -> None:
        if answer.status in _FINAL:
            for move in self._unfinished():
                self._fail(move, f"the {link.value} refuses the connection: {answer.status.label}")
        elif answer.status is not Status.SUCCESS:
            self._actions.append(Disconnect(link))
            self.lost(link, f"the open was refused: {answer.status.label}")
        if answer.status is not Status.SUCCESS:
            return
        self._open.add(link)
        if self._open == set(Link):
            for move in self._unfinished():
                if move.phase is not Phase.UNDOING:  # what the source alone can do is as good as done
                    self._ask_states(move)
        else:
            self._ask_source_alone()

    def _ask_source_alone(self) -> None:
        """A source that is still active has sent nothing that would have to be undone on the other side."""
        if self._open == {Link.SOURCE}:
            for move in self._unfinished():
                if move.goal is Goal.UNDO:
                    self._ask_states(move, Link.SOURCE)

    def _unfinished(self) -> list[Move]:
        return [move for move in self.moves.values() if not move.phase.over]

    def _ask(self, link: Link, request: Request, then: Callable[[Response], object]) -> None:
        question = self._question(link, request, then)
        passing = self._splitters.get(Link.SOURCE)
        if link is Link.DESTINATION and passing is not None and passing.in_change:
            self._behind.append(question)
        else:
            self._actions.append(Send(link, question))

    def _question(self, link: Link, request: Request, then: Callable[[Response], object]) -> bytes:
        self._opaque = self._opaque % 0xFFFFFFFF + 1
        request.opaque = self._opaque
        self._questions[link, request.opaque] = then
        return request.encode()

    def _ask_states(self, move: Move, *links: Link) -> None:
        self._set(move, Phase.ASKING)
        for link in links or tuple(Link):
            self._ask(link, memcached.GetVbucket(vbucket=move.vbucket), self._heard_state(move, link))

    def _heard_state(self, move: Move, link: Link) -> Callable[[Response], object]:
        def heard(answer: Response) -> None:
            if isinstance(answer, memcached.GetVbucketResponse) and answer.state.known:
                move.states[link] = VbucketState[answer.state.name]
            elif answer.status is Status.NOT_MY_VBUCKET:
                move.states[link] = None
            else:
                self._fail(move, f"the {link.value} does not say who it is: {answer.status.label}")
                return
            if len(move.states) == len(Link):
                self._decide(move, move.states[Link.SOURCE], move.states[Link.DESTINATION])
            elif self._open == {Link.SOURCE} and move.states.get(Link.SOURCE) is VbucketState.ACTIVE:
                self._revive(move, None)

        return heard

    # Deciding

    def _decide(self, move: Move, source: VbucketState | None, destination: VbucketState | None) -> None:
        move.states.clear()
        taken = destination is VbucketState.ACTIVE
        # The destination is pending, on disk, before the source dies: who is not has nothing to do with its death.
        interrupted = source is VbucketState.DEAD and destination is VbucketState.PENDING
        if taken and source is VbucketState.ACTIVE:
            self._fail(move, "both nodes are active: make one of them a replica, whichever has no newer writes")
        elif taken and move.goal is Goal.REPLICATE:
            self._fail(move, "the destination is active: it does not receive")
        elif taken:
            self._confirm(move, source)
        elif source is VbucketState.ACTIVE and move.goal is Goal.UNDO:
            self._revive(move, destination)
        elif source is VbucketState.ACTIVE:
            self._prepare(move, destination)
        elif interrupted and move.goal is Goal.UNDO:
            self._when_never_active(move, lambda: self._revive(move, destination))
        elif interrupted and move.goal is Goal.TAKE_OVER:
            self._when_never_active(move, lambda: self._add_stream(move))
        elif source is VbucketState.DEAD:
            why = f"the source is dead and the destination {destination.value if destination else 'not there'}"
            why = f"{why}, not pending: whoever took it over may be active"
            self._fail(move, f"{why}; if nobody is, make the source active")
        else:
            self._fail(move, f"the source does not own the vbucket: it is {source.value if source else 'not there'}")

    def _set_state(self, move: Move, link: Link, state: VbucketState, then: Callable[[], object]) -> None:
        def answered(answer: Response) -> None:
            if answer.status is Status.SUCCESS:
                then()
            else:
                why = f"{answer.status.label} {getattr(answer, 'text', '')}".rstrip()
                self._fail(move, f"the {link.value} does not become {state.value}: {why}")

        self._ask(link, _set_vbucket(move, state), answered)

    def _when_never_active(self, move: Move, then: Callable[[], object]) -> None:
        """Who becomes active begins a branch: one that the source does not know means that there were writes behind it,
        which the destination may have handed on to a third. That third may be moving it back right now."""
        logs: dict[Link, list[int]] = {}

        def heard(link: Link) -> Callable[[Response], object]:
            def take(answer: Response) -> None:
                if not isinstance(answer, memcached.GetFailoverLogResponse):
                    self._fail(move, f"the {link.value} does not tell its failover log: {answer.status.label}")
                    return
                logs[link] = [entry.vbucket_uuid for entry in answer.log]
                if len(logs) < len(Link):
                    return
                if logs[Link.DESTINATION] and logs[Link.DESTINATION][0] in logs[Link.SOURCE]:
                    then()
                else:
                    why = "the destination was active since, or fed by somebody who was"
                    self._fail(move, f"{why}: find out who is, and move the vbucket from there")

            return take

        for link in Link:
            self._ask(link, memcached.GetFailoverLog(vbucket=move.vbucket), heard(link))

    def _when_nothing_is_lost(self, move: Move, then: Callable[[], object]) -> None:
        """A dead destination may be all that is left of what was written, and a source that is active need not know
        that it was given up long ago: it must share everything that the dead copy holds."""

        def heard_log(answer: Response) -> None:
            if isinstance(answer, memcached.GetFailoverLogResponse) and answer.log:
                newest = answer.log[0].vbucket_uuid
                self._ask_dead(move, lambda held: ask_source(newest, held) if held else then())
            else:
                self._fail(move, f"the destination does not tell its failover log: {answer.status.label}")

        def ask_source(vbucket_uuid: int, held: int) -> None:
            request = memcached.ObserveSeqno(vbucket=move.vbucket, vbucket_uuid=vbucket_uuid)
            self._ask(Link.SOURCE, request, lambda answer: compare(answer, held))

        def compare(answer: Response, held: int) -> None:
            shared = 0
            if isinstance(answer, memcached.ObserveSeqnoResponse):
                shared = answer.current_seqno if answer.last_seqno is None else answer.last_seqno
            elif answer.status is not Status.KEY_ENOENT:  # which says that it does not know that branch
                self._fail(move, f"the source does not tell its high seqno: {answer.status.label}")
                return
            if shared >= held:
                then()
            else:
                why = "the destination is dead and holds what the source does not, perhaps all that a takeover has left"
                self._fail(move, f"{why}: find out who owns the vbucket; make the copy a replica if nobody needs it")

        self._ask(Link.DESTINATION, memcached.GetFailoverLog(vbucket=move.vbucket), heard_log)

    def _ask_dead(self, move: Move, then: Callable[[int], object]) -> None:
        """How far a dead copy is. One answer tells it of all of them: who asks meanwhile waits for the same."""
        self._dead_asked.append((move, then))
        if len(self._dead_asked) == 1:
            request = memcached.GetAllVbucketSeqnos(state=memcached.VbucketState.DEAD)
            self._ask(Link.DESTINATION, request, self._heard_dead)

    def _heard_dead(self, answer: Response) -> None:
        asked, self._dead_asked = self._dead_asked, []
        seqnos = answer.seqnos if isinstance(answer, memcached.GetAllVbucketSeqnosResponse) else ()
        found = {each.vbucket: each.seqno for each in seqnos}
        for move, then in asked:
            if move.vbucket in found:
                then(found[move.vbucket])
            else:
                self._fail(move, f"the destination does not tell its high seqno: {answer.status.label}")

    def _revive(self, move: Move, destination: VbucketState | None) -> None:
        """Make the source active, also one that says it is: this is answered only when it is on disk. Until then the
        destination waits on: should this be cut, it still tells that nobody has taken over."""

        def undone() -> None:
            self._set(move, Phase.UNDONE)

        def demote() -> None:
            if destination is VbucketState.PENDING:
                self._set_state(move, Link.DESTINATION, VbucketState.REPLICA, undone)
            else:
                undone()

        self._set(move, Phase.UNDOING)
        self._set_state(move, Link.SOURCE, VbucketState.ACTIVE, demote)

    def _prepare(self, move: Move, destination: VbucketState | None) -> None:
        self._set(move, Phase.PREPARING)
        if destination in (VbucketState.REPLICA, VbucketState.PENDING):
            self._add_stream(move)
        elif destination is VbucketState.DEAD:
            self._when_nothing_is_lost(move, lambda: self._make_replica(move))
        else:
            self._make_replica(move)

    def _make_replica(self, move: Move) -> None:
        self._set_state(move, Link.DESTINATION, VbucketState.REPLICA, lambda: self._add_stream(move))

    def _confirm(self, move: Move, source: VbucketState | None) -> None:
        """Active it says. Once more, because this is answered only when it is on disk. A source that is dead may have
        died for this and never heard how it ended: it remembers that it shall stay so, whatever it answers."""

        def announce() -> None:
            if source is VbucketState.DEAD:
                request = _set_vbucket(move, VbucketState.DEAD)
                move.held = self._question(Link.SOURCE, request, lambda _: self._set(move, Phase.MOVED))
            self._announce(move)

        self._set(move, Phase.CONFIRMING)
        self._set_state(move, Link.DESTINATION, VbucketState.ACTIVE, announce)

    # Streaming

    def _add_stream(self, move: Move) -> None:
        self._begun = True
        self._set(move, Phase.STREAMING)
        flags = upr.AddStreamFlag.TAKEOVER if move.goal is Goal.TAKE_OVER else upr.AddStreamFlag(0)

        def answered(answer: Response) -> None:
            if isinstance(answer, upr.AddStreamResponse):
                move.attempts += 1
                move.refusal = ""
                self._by_opaque[answer.stream_opaque] = move
            elif not move.phase.over:
                why = f"no stream: {answer.status.label} {getattr(answer, 'text', '')}".rstrip()
                if answer.status in _FOR_NOW:
                    move.refusal = why
                    self._rest(move, why)
                else:
                    self._fail(move, why)

        self._ask(Link.DESTINATION, upr.AddStream(vbucket=move.vbucket, flags=flags), answered)

    def _look_at_producer(self, packet: bytes) -> bool:
        """What the source tells the destination, as far as it concerns the mover."""
        if packet[0] == 0x80 and packet[1] == _SET_STATE:
            message = decoded(packet)
            assert isinstance(message, upr.SetVbucketState)
            move = self.moves.get(message.vbucket)
            if move is not None:
                move.told = message.state
                self._by_opaque[message.opaque] = move
                self._tell(move)
        elif packet[0] == 0x80 and packet[1] == dcp.StreamEnd.declaration.opcode:
            message = decoded(packet)
            assert isinstance(message, dcp.StreamEnd | upr.StreamEnd)
            move = self.moves.get(message.vbucket)
            self._by_opaque.pop(message.opaque, None)
            # Whoever stops says so, and then closes the connection, behind which everything begins again.
            known = message.opaque in self._left or message.reason is dcp.EndReason.DISCONNECTED
            if move is not None and not move.phase.over and not known:
                self._ended(move, message.reason.label)
        return True

    def _look_at_consumer(self, packet: bytes) -> bool:
        """What the destination answers: *active* is kept back until the map is pushed."""
        if packet[0] == 0x80 and packet[1] == _CLOSE_STREAM:
            closed = decoded(packet)
            assert isinstance(closed, upr.CloseStream)
            self._left_by_destination(closed.opaque)
        if packet[0] == 0x81 and packet[1] in _OF_STREAM:
            self._look_at_refusal(packet)
        if packet[0] != 0x81 or packet[1] != _SET_STATE:
            return True
        answer = decoded(packet)
        assert isinstance(answer, Response)
        move = self._by_opaque.get(answer.opaque)
        if move is None:
            return True
        told, move.told = move.told, None
        if told != upr.VbucketState.ACTIVE or answer.status is not Status.SUCCESS:
            return True
        move.held = packet
        self._announce(move)
        return False

    def _look_at_refusal(self, packet: bytes) -> None:
        answer = decoded(packet)
        assert isinstance(answer, Response)
        if answer.status is Status.KEY_ENOENT:
            self._left_by_destination(answer.opaque)

    def _left_by_destination(self, opaque: int) -> None:
        """The destination has left a stream, as when somebody made its copy active: the source goes on in vain."""
        move = self._by_opaque.pop(opaque, None)
        if move is not None and move.phase is Phase.STREAMING:
            self._left.add(opaque)
            self._ended(move, "the destination has left it")

    def _announce(self, move: Move) -> None:
        """Push the new map to both and to all others, then let the stream end."""
        self._set(move, Phase.ANNOUNCING)
        if self.new_map is None:
            self._announced(move)
            return
        move.announcement = encoded = self.new_map(move.vbucket)
        move.unannounced = set(Link)
        if self.has_others:
            move.unannounced.add(None)
            self._actions.append(Announce(move.vbucket, encoded))

        def pushed(link: Link) -> Callable[[Response], object]:
            # A node that knows a newer map already refuses ours, and is right.
            return lambda _: self._announced_to(move, link)

        for link in Link:
            self._ask(link, memcached.SetClusterConfig(config=encoded), pushed(link))

    def announced(self, vbucket: int, encoded: bytes) -> None:
        """All other nodes that could be reached were told this map."""
        move = self.moves[vbucket]
        if move.phase is Phase.ANNOUNCING and move.announcement == encoded:
            self._announced_to(move, None)

    def _announced_to(self, move: Move, where: Link | None) -> None:
        move.unannounced.discard(where)
        if not move.unannounced:
            self._announced(move)

    def _announced(self, move: Move) -> None:
        if not move.held:
            self._set(move, Phase.MOVED)
            return
        self._set(move, Phase.ENDING)
        held, move.held = move.held, b""
        self._actions.append(Send(Link.SOURCE, held))

    def _ended(self, move: Move, reason: str) -> None:
        if move.phase is Phase.ENDING:
            self._set(move, Phase.MOVED)
        elif move.goal is Goal.REPLICATE:
            self._rest(move, f"the stream has ended: {reason}")
        elif move.attempts >= ATTEMPTS_MAX:
            self._fail(move, f"the stream has ended: {reason}")
        else:
            self._ask_states(move)

    def _rest(self, move: Move, reason: str) -> None:
        self._set(move, Phase.RESTING, reason)
        self._actions.append(Rest(move.vbucket))

    def rested(self, vbucket: int) -> None:
        """A while has passed: go on, unless the connections were lost meanwhile, for then all begins again anyway."""
        move = self.moves[vbucket]
        if move.phase is Phase.RESTING:
            self._ask_states(move)

    def _fail(self, move: Move, reason: str) -> None:
        self._set(move, Phase.FAILED, reason)

    def _set(self, move: Move, phase: Phase, reason: str = "") -> None:
        move.phase, move.reason = phase, reason
        self._tell(move)

    def _tell(self, move: Move) -> None:
        if self.on_phase is not None:
            self.on_phase(move)


def moved_map(config: Mapping[str, Any], vbucket: int, server: int) -> dict[str, Any]:
    """A cluster map in which the vbucket belongs to another server, by its place in the map's list: one revision on."""
    moved = copy.deepcopy(dict(config))
    servers = moved["vBucketServerMap"]
    old = servers["vBucketMap"][vbucket]
    # Who held a copy there holds the active one now; the old owner is left out, for it is dead.
    servers["vBucketMap"][vbucket] = [server, *(-1 if place == server else place for place in old[1:])]
    moved["rev"] = int(moved["rev"]) + 1
    # Maps that nodes made up for themselves have the epoch 1: a pushed one is newer than all of them.
    moved["revEpoch"] = max(2, int(moved.get("revEpoch", 0)))
    return moved


__all__ = [
    "Action",
    "Announce",
    "Connect",
    "Disconnect",
    "Goal",
    "Link",
    "Move",
    "MoverSteps",
    "Phase",
    "Rest",
    "Send",
    "moved_map",
]
