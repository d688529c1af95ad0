"""Moves vbuckets from one node to another: the steps, without I/O.

Theory of operation. A mover holds two connections, one of the producer type to the source and one of the consumer type
to the destination, and relays what the two send each other (``relay``). It tells the destination which streams to add;
the takeover itself happens between the two nodes (docs/semantics.md). The mover must find out how it ended, whatever
fails.

The mover keeps no state across a lost connection. Whenever both connections are open, it asks both nodes for the role
of every unfinished vbucket. Opening a connection closes the one that had its name before, with everything that was in
flight there; so the answers stay true until this mover changes them. (Movers between the same two nodes must therefore
have the same name, and movers between other nodes another one: a source stores the name of its successor and lets no
other mover continue the takeover or undo it.) What follows from the two roles is in the table "States and events" of
docs/semantics.md; ``_decide`` carries it out.

An interrupted takeover is continued or undone only if the destination was never active since. It was not if it is
pending and on a branch that the source knows: a copy is pending on disk before the source becomes dead, and no longer
pending once its role changes or a stream feeds it from a newer branch. (The failover logs of two copies alone are not
enough: a copy that was active, and is a replica again, may be fed by a node that knows nothing of it.) A source that
knows that the takeover was completed refuses both. While the destination cannot be reached, a dead source stays dead:
the destination may be active. A source that is still active has sent nothing that could make the destination active, so
nothing there needs to be undone.

Replication continues until it is stopped. When a stream ends, because the source was flushed or the role of a copy was
changed, the mover waits a while, asks both nodes again, and adds the stream again. It does the same for a stream that
is refused temporarily, with any goal. The caller decides how often.

When the destination has answered *active*, the mover pushes the new map to both nodes before it relays the answer,
which ends the stream: clients that look for the new owner then find it. It does so too when that answer was lost and
the source has to be told: the map does not wait for the disk of the old owner.
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

#: How often a takeover is started that breaks off for another reason than a lost connection.
ATTEMPTS_MAX: Final = 3

_CLOSE_STREAM: Final = upr.CloseStream.declaration.opcode
_SET_STATE: Final = upr.SetVbucketState.declaration.opcode
#: Messages of a stream; the destination answers KEY_ENOENT if it has left the stream.
_OF_STREAM: Final = frozenset(
    message.declaration.opcode
    for message in (dcp.SnapshotMarker, dcp.Mutation, dcp.Deletion, dcp.Expiration, dcp.SeqnoAdvanced, upr.Flush)
)


class Link(enum.Enum):
    """One of the two connections."""

    SOURCE = "source"
    DESTINATION = "destination"


class Goal(enum.Enum):
    """What the mover does with a vbucket."""

    REPLICATE = "replicate"
    TAKE_OVER = "take over"
    UNDO = "undo"


class Phase(enum.Enum):
    """The progress of a vbucket."""

    WAITING = "waiting for the connections"
    ASKING = "asking both nodes for their roles"
    PREPARING = "preparing the destination"
    STREAMING = "streaming"
    RESTING = "waiting before the stream is added again"
    ANNOUNCING = "pushing the new map"
    ENDING = "waiting for the source to store that the takeover is complete"
    CONFIRMING = "having the destination confirm its role"
    UNDOING = "making the source active again"
    MOVED = "moved"
    UNDONE = "undone"
    FAILED = "failed"

    @property
    def over(self) -> bool:
        """Whether nothing more happens."""
        return self in (Phase.MOVED, Phase.UNDONE, Phase.FAILED)


@dataclass(frozen=True, slots=True)
class Connect:
    """Connect to this node and call ``connected``, or ``lost`` if that fails; after a loss, wait a while first."""

    link: Link


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close the connection to this node; do not call ``lost``."""

    link: Link


@dataclass(frozen=True, slots=True)
class Send:
    """Send these bytes."""

    link: Link
    data: Buffer


@dataclass(frozen=True, slots=True)
class Announce:
    """Push this map to all other nodes and call ``announced``, whether or not they accepted it."""

    vbucket: int
    encoded: bytes


@dataclass(frozen=True, slots=True)
class Rest:
    """Wait a while, longer each time, and call ``rested``: a stream has ended or was refused, and is to be added
    again."""

    vbucket: int


Action = Connect | Disconnect | Send | Announce | Rest
#: Temporary refusals of a stream.
_FOR_NOW: Final = frozenset({Status.ETMPFAIL, Status.EBUSY, Status.ENOMEM})
#: Permanent refusals of an open.
_FINAL: Final = frozenset({Status.AUTH_ERROR, Status.EACCESS, Status.UNKNOWN_COMMAND, Status.NOT_SUPPORTED})


class Move:
    """One vbucket that is being moved."""

    def __init__(self, vbucket: int, goal: Goal) -> None:
        self.vbucket = vbucket
        self.goal = goal
        self.phase = Phase.WAITING
        #: Why it failed, or what it waits for.
        self.reason = ""
        #: Why its stream is refused temporarily; empty once one is accepted.
        self.refusal = ""
        self.attempts = 0
        #: The roles that the nodes have answered since both connections are open; None for no such vbucket.
        self.states: dict[Link, VbucketState | None] = {}
        #: The packet for the source that waits until the map is pushed: the answer to *active*, or a request to stay
        #: dead.
        self.held: bytes = b""
        #: The role that the source has told the destination to take, until that is answered.
        self.told: upr.VbucketState | None = None
        #: The map that is being pushed, and the nodes that have not answered yet; None stands for all others.
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
        """``new_map`` returns the cluster map to push once a vbucket is taken over; ``has_others`` pushes it to other
        nodes too."""
        self.name = name
        self.moves = {vbucket: Move(vbucket, goal) for vbucket in vbuckets}
        self.new_map = new_map
        self.has_others = has_others
        self.on_phase = on_phase
        self.bytes_passed_on = 0
        self._actions: deque[Action] = deque()
        self._open: set[Link] = set()
        self._splitters: dict[Link, PacketSplitter] = {}
        #: What to do with each answer, by link and opaque.
        self._questions: dict[tuple[Link, int], Callable[[Response], object]] = {}
        self._opaque = 0
        #: Requests to the destination that wait for the end of a relayed change.
        self._behind: list[bytes] = []
        #: Moves that wait for the answer with the seqnos of dead copies.
        self._dead_asked: list[tuple[Move, Callable[[int], object]]] = []
        #: Takeovers by the opaque of their stream.
        self._by_opaque: dict[int, Move] = {}
        #: The opaques of streams that the destination has left: messages of the source for them are ignored.
        self._left: set[int] = set()
        #: Streams were added on these connections.
        self._begun = False

    # Called by the shell, which does the I/O

    def start(self) -> None:
        """Connect to both nodes."""
        for link in Link:
            self._actions.append(Connect(link))

    def actions(self) -> list[Action]:
        """What to do now, in this order; each action is returned once."""
        actions = list(self._actions)
        self._actions.clear()
        return actions

    @property
    def over(self) -> bool:
        """Whether nothing is left to do. Replication continues until it is stopped."""
        return all(move.phase.over for move in self.moves.values())

    def connected(self, link: Link) -> None:
        """A connection is made: open it under our name, which ends an earlier connection of that name."""
        self._splitters[link] = PacketSplitter()
        flags = dcp.OpenFlag.PRODUCER if link is Link.SOURCE else dcp.OpenFlag.CONSUMER
        self._ask(link, dcp.Open(name=self.name.encode(), flags=flags), lambda answer: self._opened(link, answer))

    def lost(self, link: Link, why: str = "") -> None:
        """A connection was lost, or could not be made. If streams had begun, both connections start again."""
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
        """Undo a takeover, as far as that is still possible: everything starts again with that goal."""
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
        """These connections are gone; requests on either no longer count."""
        self._open -= links
        for link in links:
            self._splitters.pop(link, None)
        self._questions = {
            question: then
            for question, then in self._questions.items()
            if question[0] not in links and question[0] not in self._open  # the answer to its open is still awaited
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
        """Relay received bytes, except what is for the mover. The buffer must stay valid until the actions are
        taken."""
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
        """Handle a packet; return whether to relay it."""
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
                self._fail(move, f"the {link.value} refused the connection: {answer.status.label}")
        elif answer.status is not Status.SUCCESS:
            self._actions.append(Disconnect(link))
            self.lost(link, f"the open was refused: {answer.status.label}")
        if answer.status is not Status.SUCCESS:
            return
        self._open.add(link)
        if self._open == set(Link):
            for move in self._unfinished():
                if move.phase is not Phase.UNDOING:  # the source alone completes it
                    self._ask_states(move)
        else:
            self._ask_source_alone()

    def _ask_source_alone(self) -> None:
        """A source that is still active has sent nothing that the destination would have to undo."""
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
                self._fail(move, f"the {link.value} refused to tell its role: {answer.status.label}")
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
        # The destination is pending on disk before the source becomes dead.
        interrupted = source is VbucketState.DEAD and destination is VbucketState.PENDING
        if taken and source is VbucketState.ACTIVE:
            self._fail(move, "both nodes are active: make the one without newer writes a replica")
        elif taken and move.goal is Goal.REPLICATE:
            self._fail(move, "the destination is active and cannot receive")
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
            found = f"is {destination.value}" if destination else "has no copy"
            why = f"the source is dead and the destination {found}, not pending: another node may be active"
            self._fail(move, f"{why}. If no other copy is active, make the source active")
        else:
            self._fail(
                move, f"the source does not own the vbucket: it {f'is {source.value}' if source else 'has no copy'}"
            )

    def _set_state(self, move: Move, link: Link, state: VbucketState, then: Callable[[], object]) -> None:
        def answered(answer: Response) -> None:
            if answer.status is Status.SUCCESS:
                then()
            else:
                why = f"{answer.status.label} {getattr(answer, 'text', '')}".rstrip()
                self._fail(move, f"the {link.value} refused to become {state.value}: {why}")

        self._ask(link, _set_vbucket(move, state), answered)

    def _when_never_active(self, move: Move, then: Callable[[], object]) -> None:
        """Becoming active begins a branch. If the destination is on a branch that the source does not know, there may
        be newer writes, which it may have handed over to a third node. That node may be moving the vbucket back right
        now."""
        logs: dict[Link, list[int]] = {}

        def heard(link: Link) -> Callable[[Response], object]:
            def take(answer: Response) -> None:
                if not isinstance(answer, memcached.GetFailoverLogResponse):
                    self._fail(move, f"the {link.value} refused to tell its failover log: {answer.status.label}")
                    return
                logs[link] = [entry.vbucket_uuid for entry in answer.log]
                if len(logs) < len(Link):
                    return
                if logs[Link.DESTINATION] and logs[Link.DESTINATION][0] in logs[Link.SOURCE]:
                    then()
                else:
                    why = "the destination was active since, or was fed by a node that was"
                    self._fail(move, f"{why}. Find the owner and move the vbucket from there")

            return take

        for link in Link:
            self._ask(link, memcached.GetFailoverLog(vbucket=move.vbucket), heard(link))

    def _when_nothing_is_lost(self, move: Move, then: Callable[[], object]) -> None:
        """A dead destination may hold the only copy of some writes, and an active source may not know that it was
        replaced long ago. So the source must hold everything that the dead copy does."""

        def heard_log(answer: Response) -> None:
            if isinstance(answer, memcached.GetFailoverLogResponse) and answer.log:
                newest = answer.log[0].vbucket_uuid
                self._ask_dead(move, lambda held: ask_source(newest, held) if held else then())
            else:
                self._fail(move, f"the destination refused to tell its failover log: {answer.status.label}")

        def ask_source(vbucket_uuid: int, held: int) -> None:
            request = memcached.ObserveSeqno(vbucket=move.vbucket, vbucket_uuid=vbucket_uuid)
            self._ask(Link.SOURCE, request, lambda answer: compare(answer, held))

        def compare(answer: Response, held: int) -> None:
            shared = 0
            if isinstance(answer, memcached.ObserveSeqnoResponse):
                shared = answer.current_seqno if answer.last_seqno is None else answer.last_seqno
            elif answer.status is not Status.KEY_ENOENT:  # the source does not know that branch
                self._fail(move, f"the source refused to tell its high seqno: {answer.status.label}")
                return
            if shared >= held:
                then()
            else:
                why = "the destination is dead and holds what the source does not"
                self._fail(move, f"{why}. Find the owner of the vbucket; make the copy a replica if it is not needed")

        self._ask(Link.DESTINATION, memcached.GetFailoverLog(vbucket=move.vbucket), heard_log)

    def _ask_dead(self, move: Move, then: Callable[[int], object]) -> None:
        """Ask how far a dead copy is. One answer covers all dead copies, so concurrent requests share it."""
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
                self._fail(move, f"the destination refused to tell its high seqno: {answer.status.label}")

    def _revive(self, move: Move, destination: VbucketState | None) -> None:
        """Make the source active, even if it says so already: this request is answered only when it is on disk. The
        destination stays pending until then, so that an interrupted undo can be recognized."""

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
        """The destination says that it is active. Request that again, because this request is answered only when it is
        on disk. A dead source may not know that the takeover is complete: tell it to stay dead, whatever it answers."""

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
                why = f"the stream was refused: {answer.status.label} {getattr(answer, 'text', '')}".rstrip()
                if answer.status in _FOR_NOW:
                    move.refusal = why
                    self._rest(move, why)
                else:
                    self._fail(move, why)

        self._ask(Link.DESTINATION, upr.AddStream(vbucket=move.vbucket, flags=flags), answered)

    def _look_at_producer(self, packet: bytes) -> bool:
        """Handle a packet from the source."""
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
            # A node that stops says so and closes the connection, and then everything starts again.
            known = message.opaque in self._left or message.reason is dcp.EndReason.DISCONNECTED
            if move is not None and not move.phase.over and not known:
                self._ended(move, message.reason.label)
        return True

    def _look_at_consumer(self, packet: bytes) -> bool:
        """Handle a packet from the destination: the answer to *active* is held until the map is pushed."""
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
        """The destination has left a stream, for instance because its copy became active; the source does not know."""
        move = self._by_opaque.pop(opaque, None)
        if move is not None and move.phase is Phase.STREAMING:
            self._left.add(opaque)
            self._ended(move, "the destination left it")

    def _announce(self, move: Move) -> None:
        """Push the new map to both nodes and to all others, then let the stream end."""
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
            # A node with a newer map refuses ours, which is fine.
            return lambda _: self._announced_to(move, link)

        for link in Link:
            self._ask(link, memcached.SetClusterConfig(config=encoded), pushed(link))

    def announced(self, vbucket: int, encoded: bytes) -> None:
        """All other nodes that could be reached were sent this map."""
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
            self._rest(move, f"the stream ended: {reason}")
        elif move.attempts >= ATTEMPTS_MAX:
            self._fail(move, f"the stream ended: {reason}")
        else:
            self._ask_states(move)

    def _rest(self, move: Move, reason: str) -> None:
        self._set(move, Phase.RESTING, reason)
        self._actions.append(Rest(move.vbucket))

    def rested(self, vbucket: int) -> None:
        """The wait is over: ask again, unless the connections were lost meanwhile."""
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
    """A cluster map, one revision newer, in which the vbucket belongs to another server, given by its index in the
    map's list."""
    moved = copy.deepcopy(dict(config))
    servers = moved["vBucketServerMap"]
    old = servers["vBucketMap"][vbucket]
    # The server that had a replica has the active copy now; the old owner is left out, because it is dead.
    servers["vBucketMap"][vbucket] = [server, *(-1 if place == server else place for place in old[1:])]
    moved["rev"] = int(moved["rev"]) + 1
    # Maps that nodes make for themselves have epoch 1; a pushed map is newer than all of them.
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
