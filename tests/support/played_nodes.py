"""Two nodes that a test plays for the steps of a mover."""

from collections.abc import Iterator

from upriver.model import VbucketState
from upriver.protocol.move.mover import Action, Connect, Goal, Link, Move, MoverSteps, Phase, Send
from upriver.wire import AnyResponse, Framer, Message, Request, Status, dcp, memcached, upr
from upriver.wire.framing import MEMCACHED

SOURCE, DESTINATION = Link
STREAM_OPAQUE = 0x77


class PlayedNodes:
    """A mover of vbucket 0, and two nodes whose roles and failover logs a test sets."""

    def __init__(
        self,
        source: VbucketState | None,
        destination: VbucketState | None,
        goal: Goal = Goal.TAKE_OVER,
        *,
        has_others: bool = False,
    ) -> None:
        self.states = {SOURCE: source, DESTINATION: destination}
        self.uuids = {SOURCE: [7], DESTINATION: [7]}
        self.high_seqnos = {SOURCE: 5, DESTINATION: 5}
        #: What the destination answers when the mover adds a stream.
        self.add_stream = Status.SUCCESS
        #: Whether the source refuses to become active: its takeover belongs to another mover, or is complete.
        self.source_refuses = False
        #: How often each node was sent a new map.
        self.maps_pushed = {SOURCE: 0, DESTINATION: 0}
        #: Everything that the mover did, in short.
        self.did: list[str] = []
        self.other_actions: list[Action] = []
        self.phases: list[Phase] = []
        self.mover = MoverSteps(
            "a->b",
            [0],
            goal,
            new_map=lambda _: b"{}",
            has_others=has_others,
            on_phase=lambda move: self.phases.append(move.phase),
        )
        self.mover.start()

    @property
    def move(self) -> Move:
        return self.mover.moves[0]

    def run(self) -> "PlayedNodes":
        """Answer everything until the mover waits for something else."""
        while actions := self.mover.actions():
            for action in actions:
                match action:
                    case Connect(link):
                        self.mover.connected(link)
                    case Send(link, data):
                        self.answer(link, bytes(data))
                    case _:
                        self.other_actions.append(action)
        return self

    def answer(self, link: Link, data: bytes) -> None:
        for request in messages(data):
            if isinstance(request, Request) and (answer := self.answer_to(link, request)) is not None:
                answer.opaque = request.opaque  # type: ignore[attr-defined]
                self.mover.received(link, answer.encode())

    def answer_to(self, link: Link, request: Request) -> Message | None:
        state = self.states[link]
        match request:
            case memcached.SetClusterConfig():
                self.maps_pushed[link] += 1
                return AnyResponse(opcode=request.code)
            case dcp.Open():
                return AnyResponse(opcode=request.code)
            case memcached.GetVbucket() if state is None:
                return AnyResponse(opcode=request.code, status=Status.NOT_MY_VBUCKET)
            case memcached.GetVbucket():
                assert state is not None
                return memcached.GetVbucketResponse(state=memcached.VbucketState[state.name])
            case memcached.SetVbucket(state=memcached.VbucketState.ACTIVE) if link is SOURCE and self.source_refuses:
                return AnyResponse(opcode=request.code, status=Status.KEY_EEXISTS, value=b"handed over")
            case memcached.SetVbucket():
                self.did.append(f"{link.value} {request.state.name.lower()}")
                self.states[link] = VbucketState[request.state.name]
                return AnyResponse(opcode=request.code)
            case memcached.GetFailoverLog():
                log = tuple(memcached.FailoverEntry(vbucket_uuid=uuid, seqno=0) for uuid in self.uuids[link])
                return memcached.GetFailoverLogResponse(log=log)
            case memcached.GetAllVbucketSeqnos():
                seqnos = (memcached.VbucketSeqno(vbucket=0, seqno=self.high_seqnos[link]),)
                return memcached.GetAllVbucketSeqnosResponse(seqnos=seqnos)
            case memcached.ObserveSeqno() if request.vbucket_uuid not in self.uuids[link]:
                return AnyResponse(opcode=request.code, status=Status.KEY_ENOENT)
            case memcached.ObserveSeqno():
                high_seqno = self.high_seqnos[link]
                return memcached.ObserveSeqnoResponse(
                    vbucket=0, vbucket_uuid=7, persisted_seqno=high_seqno, current_seqno=high_seqno
                )
            case upr.AddStream():
                takeover = upr.AddStreamFlag.TAKEOVER in request.flags
                self.did.append("takeover stream" if takeover else "stream")
                if self.add_stream is Status.SUCCESS:
                    return upr.AddStreamResponse(stream_opaque=STREAM_OPAQUE)
                return AnyResponse(opcode=request.code, status=self.add_stream, value=b"later")
        return None

    def say(self, link: Link, message: Message) -> list[Action]:
        """One node says something to the other; return what the mover does before anybody answers."""
        self.mover.received(link, message.encode())
        return self.mover.actions()


def messages(data: bytes) -> Iterator[Message]:
    framer = Framer(MEMCACHED)
    framer.feed(data)
    while packet := framer.next_packet():
        yield dcp.dcp.decode(packet)
