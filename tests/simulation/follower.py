"""A foreign consumer on a link: it speaks `dcp`, `upr` or a draft to a machine and moves its holders along.

The drafts are heard and spoken through the project's own translation to `upr`; what they mean is decided here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.simulation.holders import Holder
from tests.simulation.node import Link, Machine
from tests.simulation.truth import Contents, Version, Violation, version, without
from upriver.errors import TemporaryFailure, WireError
from upriver.model import Event, FailoverEntry, FailoverLog
from upriver.protocol.consumer.draft_translation import DraftTranslator
from upriver.protocol.flow_control import ReceiveWindow
from upriver.wire import (
    AnyResponse,
    Dialect,
    Framer,
    Message,
    Request,
    Response,
    dcp,
    memcached,
    upr,
    upr_draft1,
    upr_draft2,
    upr_draft3,
)
from upriver.wire.codes import Magic, Status
from upriver.wire.framing import MEMCACHED

NO_END = 2**64 - 1
DRAFTS = {dialect.name: dialect for dialect in (upr_draft1.upr_draft1, upr_draft2.upr_draft2, upr_draft3.upr_draft3)}


@dataclass(slots=True, kw_only=True)
class Habits:
    """How a consumer asks."""

    dialect: str = "dcp"
    window_bytes: int = 0
    delete_times: bool = False
    keys_only: bool = False
    persisted_only: bool = False
    history: bool = False
    key_filter: str = ""
    #: Streams end this many seqnos after their start, and are requested again; 0 for never.
    stride: int = 0

    def as_told(self, contents: Contents) -> Contents:
        """What the requested streams tell of it: the first two drafts have no field for the data type."""
        if self.keys_only:
            return without(contents, value=b"", datatype=0)
        return without(contents, datatype=0) if self.dialect in ("upr_draft1", "upr_draft2") else contents

    @property
    def draft(self) -> Dialect | None:
        """The draft that it speaks, if it does."""
        return DRAFTS.get(self.dialect)

    def __str__(self) -> str:
        words = [self.dialect]
        words += [name for name in ("delete_times", "keys_only", "persisted_only", "history") if getattr(self, name)]
        words += [
            f"{name}={value}" for name in ("window_bytes", "key_filter", "stride") if (value := getattr(self, name))
        ]
        return " ".join(words)


@dataclass(slots=True)
class Track:
    """The stream of one vbucket."""

    number: int
    holder: Holder
    #: "idle", "log" (asked for the failover log), "asked", "streaming".
    phase: str = "idle"
    opaque: int = 0
    #: The newest entry that the position was compared with (`upr`).
    compared: FailoverEntry | None = None
    #: Where the stream was asked to end, if it was; the producer may not be able to show that state.
    end: int = 0
    may_bound: bool = True
    refusals: list[Status] = field(default_factory=list)


class Follower:
    """One consumer: a name, habits, and holders for some vbuckets."""

    def __init__(self, name: str, habits: Habits, holders: dict[int, Holder], note: Callable[[str], None]) -> None:
        self.name = name
        self.habits = habits
        self.tracks = {number: Track(number, holder) for number, holder in holders.items()}
        self.note = note
        self.link: Link | None = None
        #: Called with a vbucket number when its holder says that it is consistent.
        self.on_consistent: Callable[[int], None] | None = None
        self._opaque = 0
        self._connections = 0

    def __str__(self) -> str:
        return self.name

    # Connecting.

    def connect(self, machine: Machine, wanted: Sequence[int] | None = None) -> None:
        """Open a connection, with our settings, and ask for everything, or what is wanted."""
        if self.link is not None:
            self.link.cut()
        draft = self.habits.draft
        self._framer = Framer(draft.framing if draft else MEMCACHED)
        self._translator = DraftTranslator(draft.name) if draft else None
        self._window = ReceiveWindow(self.habits.window_bytes)
        self._connections += 1
        if draft is not None:  # it has neither an open nor settings, and its connections no name
            self.link = Link(machine, self, f"{self.name}-{self._connections}", draft.name)
            self.ask_all(wanted)
            return
        self.link = Link(machine, self, self.name)
        flags = dcp.OpenFlag.PRODUCER
        if self.habits.delete_times:
            flags |= dcp.OpenFlag.DELETE_TIMES
        self._send(dcp.Open(name=self.name.encode(), flags=flags))
        self._control("enable_expiry_opcode", "true")
        for name in ("keys_only", "persisted_only", "history"):
            if getattr(self.habits, name):
                self._control(name, "true")
        if self.habits.key_filter:
            self._control("key_filter", self.habits.key_filter)
        if self.habits.window_bytes:
            self._control("connection_buffer_size", str(self.habits.window_bytes))
        self.ask_all(wanted)

    def _control(self, name: str, value: str) -> None:
        self._send(dcp.Control(key=name.encode(), value=value.encode()))

    def lost(self, link: Link) -> None:
        """The connection is gone."""
        if link is self.link:
            self.link = None
            for track in self.tracks.values():
                track.phase = "idle"

    def _send(self, message: Message) -> None:
        assert self.link is not None
        self.link.send(message.encode() if self._translator is None else self._translator.outgoing(message))

    # Asking.

    @property
    def idle(self) -> list[int]:
        """The vbuckets that could be followed and are not."""
        return [number for number, track in self.tracks.items() if track.phase == "idle" and track.holder.ready]

    def attend(self) -> None:
        """Somebody looks after what stopped at a rollback."""
        for track in self.tracks.values():
            if track.holder.failed:
                track.holder.reset_by_operator()

    def ask_all(self, wanted: Sequence[int] | None = None) -> None:
        """Ask for every stream that is not there."""
        for number, track in self.tracks.items():
            if wanted is None or number in wanted:
                self.ask(track)

    def ask(self, track: Track) -> None:
        """Ask for a stream from the holder's position."""
        if self.link is None or track.phase != "idle" or not track.holder.ready:
            return
        if self.habits.dialect != "dcp" and not self.link.machine.owns(track.number):
            return  # without bounds in its request only the active copy can be sure to finish a torn snapshot
        self._opaque += 1
        track.opaque = self._opaque
        if self.habits.dialect != "dcp":
            track.phase = "log"
            self._send(upr.FailoverLogRequest(vbucket=track.number, opaque=track.opaque))
            return
        holder = track.holder
        start, end = (
            (holder.start, holder.end) if holder.consistent_seqno != holder.seqno else (holder.seqno, holder.seqno)
        )
        track.phase = "asked"
        self._send(
            dcp.StreamRequest(
                vbucket=track.number,
                opaque=track.opaque,
                start_seqno=holder.seqno,
                end_seqno=self._end(track),
                vbucket_uuid=holder.log.newest.vbucket_uuid if holder.log else 0,
                snapshot_start=start,
                snapshot_end=end,
            )
        )

    def _end(self, track: Track) -> int:
        track.end = track.holder.seqno + self.habits.stride if self.habits.stride and track.may_bound else 0
        return track.end or NO_END

    def _compare(self, track: Track, log: FailoverLog) -> None:
        """`upr` requests carry no bounds: the consumer decides by itself whether it may go on."""
        holder, entry = track.holder, log.newest
        if holder.seqno and holder.log is not None:
            known = [own for own in holder.log if own in log.entries]
            if not known:
                if not self._roll_back(track, 0):
                    return
                entry = max(log.entries, key=lambda e: e.seqno)
            else:
                entry = known[0]
                if holder.log.newest != log.newest:
                    newer = holder.log.entries[: holder.log.entries.index(entry)]
                    back = min([holder.consistent_seqno, *(own.seqno for own in newer)])
                    if back < holder.seqno and not self._roll_back(track, back):
                        return
        if not holder.ready:
            track.phase = "idle"
            return
        track.compared = log.newest
        track.phase = "asked"
        self._send(
            upr.StreamRequest(
                vbucket=track.number,
                opaque=track.opaque,
                start_seqno=holder.seqno,
                end_seqno=self._end(track),
                vbucket_uuid=entry.vbucket_uuid,
                high_seqno=entry.seqno,
            )
        )

    def _roll_back(self, track: Track, seqno: int) -> bool:
        self.note(f"{self} vb{track.number}: rolls back from {track.holder.seqno} to {seqno}")
        if track.holder.roll_back(seqno):
            return True
        self._give_up(track)
        return False

    def _give_up(self, track: Track) -> None:
        """Nothing can be repaired now: try again on another connection."""
        self.note(f"{self} vb{track.number}: cannot repair, there is no active copy")
        track.phase = "idle"
        if self.link is not None:
            self.link.cut()

    # Receiving.

    def receive(self, link: Link, data: bytes) -> None:
        """Bytes have come, in whatever pieces."""
        self._framer.feed(data)
        while self.link is link and (packet := self._framer.next_packet()):
            try:
                for message in self._decode(packet):
                    self._take(message)
            except Violation as error:
                raise Violation(f"{self}: {error}") from None
            except (TemporaryFailure, WireError) as error:  # our own disk is full, or a log has changed: another time
                self.note(f"{self}: leaves, {error}")
                link.cut()
            if self.link is link and packet[0] == Magic.REQUEST:
                due = self._window.processed(len(packet))
                if due:
                    self._send(dcp.BufferAck(bytes_processed=due))

    def _decode(self, packet: bytes) -> list[Message]:
        draft = self.habits.draft
        if draft is None or self._translator is None:
            return [dcp.dcp.decode(packet)]
        return self._translator.incoming(draft.decode(packet))

    def _take(self, message: Message) -> None:
        assert isinstance(message, Request | Response)
        track = next((track for track in self.tracks.values() if track.opaque == message.opaque), None)
        if isinstance(message, dcp.Noop):
            self._send(AnyResponse(opcode=message.code, opaque=message.opaque))
        elif isinstance(message, Response):
            if message.code in (upr.FailoverLogRequest.declaration.opcode, upr.StreamRequest.declaration.opcode):
                if track is not None:
                    self._answered(track, message)
            elif message.code == upr.CloseStream.declaration.opcode and message.status is Status.KEY_ENOENT:
                pass  # it had ended meanwhile
            elif message.status is not Status.SUCCESS:
                raise Violation(f"{message.title()} was answered with {message.status.label}")
        elif track is not None and track.phase == "streaming":
            self._stream(track, message)
        elif track is not None and not isinstance(message, dcp.StreamEnd | upr.StreamEnd):
            raise Violation(f"{message.title()} comes on a stream that is {track.phase}")

    def _answered(self, track: Track, answer: Response) -> None:
        match answer:
            case upr.FailoverLogResponse():
                self._compare(track, _log(answer.log))
            case upr.StreamRequestResponse():
                self._accepted(track, _log(answer.log))
            case dcp.RollbackRequired() | upr.RollbackRequired():
                self._told_to_roll_back(track, answer.seqno)
            case _ if answer.status in (Status.KEY_ENOENT, Status.ERANGE):
                if answer.status is Status.ERANGE and track.end:
                    track.may_bound = False  # the state at the end is not there any more
                    track.phase = "idle"
                    self.ask(track)
                elif self.habits.dialect == "dcp":
                    raise Violation(f"a position inside its snapshot was answered with {answer.status.label}")
                else:
                    self._told_to_roll_back(track, 0)
            case _ if answer.status in (Status.ETMPFAIL, Status.NOT_MY_VBUCKET):
                track.phase = "idle"
            case _:
                raise Violation(f"a stream request was answered with {answer.status.label}")

    def _told_to_roll_back(self, track: Track, seqno: int) -> None:
        holder = track.holder
        if not holder.seqno:
            raise Violation("a start at 0 was answered with a rollback")
        if seqno > holder.seqno:
            raise Violation(f"a rollback to {seqno} lies beyond {holder.seqno}")
        if self._roll_back(track, seqno):
            track.phase = "idle"
            self.ask(track)

    def _accepted(self, track: Track, log: FailoverLog) -> None:
        holder = track.holder
        if self.habits.dialect != "dcp" and log.newest != track.compared and holder.consistent_seqno != holder.seqno:
            # The log has changed between the comparison and the request: that position is no longer safe.
            self._drop(track)
            if self._roll_back(track, holder.consistent_seqno):
                self.ask(track)
            return
        if not holder.accept(log):
            self._give_up(track)
            return
        track.phase = "streaming"
        self.note(f"{self} vb{track.number}: accepted at {holder.seqno} under {_short(log)}")
        self._report_consistent(track)

    def _drop(self, track: Track) -> None:
        track.phase = "idle"
        self._opaque += 1
        track.opaque = 0
        if self.habits.draft is not None and self.link is not None:  # no draft can close a single stream
            self.link.cut()
            return
        self._send(upr.CloseStream(vbucket=track.number, opaque=self._opaque))

    def _stream(self, track: Track, message: Request) -> None:
        holder = track.holder
        match message:
            case dcp.SnapshotMarker():
                holder.marker(message.start_seqno, message.end_seqno)
            case upr.SnapshotMarker():
                holder.marker(None, None)
            case upr_draft3.StreamStart():
                return
            case upr_draft3.SnapshotEnd():
                if not track.end:  # else the change at the end may be purged, and only the stream's end proves it
                    holder.snapshot_end()
            case dcp.SeqnoAdvanced():
                holder.advanced(message.by_seqno)
            case upr.Flush():
                holder.clear()
                holder.log = None
            case dcp.StreamEnd() | upr.StreamEnd():
                track.phase = "idle"
                track.may_bound = True
                self.note(f"{self} vb{track.number}: the stream ends, {message.reason.name.lower()}")
                if not int(message.reason):
                    holder.ended_ok(track.end)
                    self.ask(track)
            case _:
                holder.change(_version(message), every_version=self.habits.history)
        self._report_consistent(track)

    def _report_consistent(self, track: Track) -> None:
        if self.on_consistent is not None and track.holder.certain:
            self.on_consistent(track.number)


def _log(entries: tuple[memcached.FailoverEntry, ...]) -> FailoverLog:
    return FailoverLog(tuple(FailoverEntry(entry.vbucket_uuid, entry.seqno) for entry in entries))


def _short(log: FailoverLog) -> str:
    return " ".join(f"{entry.vbucket_uuid:x}@{entry.seqno}" for entry in log)


def _version(message: Request) -> Version:
    match message:
        case dcp.Mutation() | upr.Mutation():
            return version(
                message.by_seqno, Event.MUTATION, message.key, message.value,
                message.flags, message.expiration, message.cas, message.rev_seqno, message.datatype,
            )  # fmt: skip
        case dcp.Expiration() | upr.Expiration():
            event = Event.EXPIRATION
        case dcp.Deletion() | upr.Deletion():
            event = Event.DELETION
        case _:
            raise Violation(f"{message.title()} comes on a stream")
    return version(message.by_seqno, event, message.key, b"", 0, 0, message.cas, message.rev_seqno, 0)
