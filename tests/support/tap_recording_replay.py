"""Recordings of TAP, replayed against sessions of ours.

What the two servers say is compared within each vbucket of a connection: control messages and answers in their order,
and how often each change was sent between them. The client's acknowledgements are given as the recorded one gave them:
to the same message the same statuses in the same order, success to what only we ask for, and none at all if it gave
none.

Left out of every comparison is what differs by nature: CAS, times, `nru`, the numbers of the messages (those servers
count only what is acknowledged), the order of a backfill (ours is the order of the changes), which change asks for an
acknowledgement, and the vbuckets that other scenarios had left on that server. Item flags of recorded messages without
the mark for network byte order are read in the order of that machine.
"""

import difflib
from collections import Counter, defaultdict

from tests.support.in_memory_node import InMemoryNode, Peer
from tests.support.recording_replay import FOLDER, ConversationPart, Line, lines_of, packets_of, pipelined
from upriver.protocol.tap.connect_plan import TapSettings
from upriver.wire import AnyResponse, Message, Request, Response, memcached, tap
from upriver.wire.codes import Magic, Status
from upriver.wire.dialects.tap import TapFlag

Identity = tuple[int, bytes]


def recordings() -> list[str]:
    """Those of TAP."""
    return sorted(path.stem for path in FOLDER.glob("tap*.txt"))


def is_change(message: Message) -> bool:
    return isinstance(message, tap.Mutation | tap.Delete)


def identity(message: Message) -> Identity:
    """What is the same about a message on both servers."""
    if isinstance(message, tap.Mutation | tap.Delete):
        return message.code, message.key
    if isinstance(message, tap.Opaque):
        return message.code, bytes([message.control or 0])
    if isinstance(message, tap.SetVbucket):
        return message.code, bytes([message.state])
    return message.code, b""


def line(message: Message, *, recorded: bool) -> str:
    """A message as text."""
    match message:
        case tap.Mutation():
            flags = message.flags
            if recorded and TapFlag.NETWORK_BYTE_ORDER not in message.tap_flags:
                flags = int.from_bytes(flags.to_bytes(4, "little"), "big")
            expires = " expires" if message.expiration else ""
            mark = " network order" if TapFlag.NETWORK_BYTE_ORDER in message.tap_flags else ""
            what = f"{message.key.decode()}={message.value.decode()}"
            return f"mutation rev {message.rev_seqno} ttl {message.ttl} flags {flags:x}{mark}{expires} {what}"
        case tap.Delete():
            value = f" with {message.value.decode()}" if message.value else ""
            return f"delete rev {message.rev_seqno} ttl {message.ttl} {message.key.decode()}{value}"
        case tap.Opaque():
            name = "control" if message.control is None else message.control.name.lower()
            return f"{name}{_asks(message.tap_flags)}"
        case tap.SetVbucket():
            return f"set vbucket {message.state.name.lower()}{_asks(message.tap_flags)}"
        case tap.CheckpointStart() | tap.NamedCheckpointStart():
            return f"checkpoint start{_asks(message.tap_flags)}"
        case memcached.GetVbucketResponse():
            return f"0x3e success, state {int(message.state)}"
        case memcached.GetResponse():
            return f"0x00 success, {message.value.decode()} flags {message.flags:x}"
        case memcached.GetMetaResponse():
            return f"0xa0 success, rev {message.rev_seqno} flags {message.flags:x} deleted {int(message.deleted)}"
        case Response():
            return f"0x{message.code:02x} {message.status.name.lower()}"
    return message.title()


def _asks(marks: TapFlag) -> str:
    return ", answer" if TapFlag.ACK in marks else ""


class Conversation:
    """What one server said on one connection."""

    def __init__(self, name: str, *, recorded: bool) -> None:
        self.name = name
        self.recorded = recorded
        self.messages: list[Message] = []
        self.closed = False
        self.asked: dict[tuple[int, int], list[int]] = defaultdict(list)

    def lines(self, vbuckets: set[int]) -> dict[ConversationPart, list[str]]:
        asked = {key: list(numbers) for key, numbers in self.asked.items()}
        out: dict[ConversationPart, list[str]] = defaultdict(list)
        changes: dict[ConversationPart, Counter[str]] = defaultdict(Counter)
        for message in self.messages:
            vbucket = message.vbucket if isinstance(message, Request) else None
            if isinstance(message, Response):
                waiting = asked.get((message.code, message.opaque))
                vbucket = waiting.pop(0) if waiting else None
            if vbucket is not None and vbucket not in vbuckets:
                continue
            place, text = (self.name, vbucket), line(message, recorded=self.recorded)
            if is_change(message):
                changes[place][text] += 1
            else:
                out[place] += [*_counted(changes.pop(place, Counter())), text]
        for place, found in changes.items():
            out[place] += _counted(found)
        if self.closed:
            out[self.name, None].append("closed")
        return dict(out)


def _counted(changes: Counter[str]) -> list[str]:
    """Changes between two control messages, in an order that is the same for both servers."""
    return [f"{text} (x{count})" if count > 1 else text for text, count in sorted(changes.items())]


class TapReplay:
    """A recording, and what our node says to the same client."""

    def __init__(self, recording: str) -> None:
        self.node = InMemoryNode(vbuckets=64, tap_settings=TapSettings(ack_interval=3))
        self.recorded: dict[str, Conversation] = {}
        self.ours: dict[str, Conversation] = {}
        self.vbuckets = {0}
        self._peers: dict[str, Peer] = {}
        self._statuses: dict[str, dict[Identity, list[Status]]] = {}
        found = list(pipelined(lines_of(recording)))
        self._read_answers(found)
        started = self.node.clock()
        for each in found:
            conversation = self.recorded.setdefault(each.connection, Conversation(each.connection, recorded=True))
            if each.from_client:
                self._pass_by(max(0.0, started + each.at - self.node.clock()))
                self._send(each)
            elif each.data:
                conversation.messages += [decoded(packet) for packet in packets_of(each.data)]
            else:
                conversation.closed = True
        self._pass_by(10)

    def _read_answers(self, found: list[Line]) -> None:
        """What the recorded client answered to which message."""
        told: dict[tuple[str, int], Identity] = {}
        for each in found:
            for packet in packets_of(each.data):
                message, opaque = decoded(packet), int.from_bytes(packet[12:16], "big")
                if not each.from_client and isinstance(message, Request):
                    told[each.connection, opaque] = identity(message)
                elif each.from_client and isinstance(message, Response):
                    answers = self._statuses.setdefault(each.connection, defaultdict(list))
                    answers[told[each.connection, opaque]].append(message.status)

    def _send(self, each: Line) -> None:
        name = each.connection
        if name not in self._peers:
            self._peers[name] = self.node.connect(name)
            self.ours[name] = Conversation(name, recorded=False)
        for packet in packets_of(each.data):
            if packet[0] != Magic.REQUEST:
                continue  # our own answers follow from what our node sends
            vbucket = int.from_bytes(packet[6:8], "big")
            if packet[1] != tap.Connect.declaration.opcode:
                self.vbuckets.add(vbucket)
            for conversation in (self.recorded[name], self.ours[name]):
                conversation.asked[packet[1], int.from_bytes(packet[12:16], "big")].append(vbucket)
            self._peers[name].put(packet)
        self._settle()

    def _pass_by(self, seconds: float) -> None:
        """Time passes in steps, and what comes is answered at once."""
        until = self.node.clock() + seconds
        while self.node.clock() < until:
            self.node.pass_by(min(0.5, until - self.node.clock()))
            self._settle()

    def _settle(self) -> None:
        busy = True
        while busy:
            busy = False
            self.node.settle()
            for name, peer in self._peers.items():
                messages = peer.take()
                self.ours[name].messages += messages
                self.ours[name].closed = peer.closed
                for message in messages:
                    busy = self._answer(name, peer, message) or busy

    def _answer(self, name: str, peer: Peer, message: Message) -> bool:
        answers = self._statuses.get(name)
        if answers is None or not isinstance(message, Request) or isinstance(message, memcached.Noop):
            return False
        left = answers.get(identity(message))
        asked = TapFlag.ACK in message.tap_flags  # type: ignore[attr-defined]
        status = left.pop(0) if left and (asked or left[0] is not Status.SUCCESS) else Status.SUCCESS
        if asked or status is not Status.SUCCESS:
            peer.put(AnyResponse(opcode=message.code, opaque=message.opaque, status=status))
            return True
        return False

    def differences(self) -> dict[ConversationPart, list[str]]:
        """What the two do not have in common: ``-`` was recorded, ``+`` is ours."""
        out: dict[ConversationPart, list[str]] = {}
        for name, conversation in self.recorded.items():
            recorded, ours = conversation.lines(self.vbuckets), self.ours[name].lines(self.vbuckets)
            for place in {**recorded, **ours}:
                compared = difflib.ndiff(recorded.get(place, []), ours.get(place, []))
                found = [text for text in compared if text.startswith(("-", "+"))]
                if found:
                    out[place] = found
        return out


def decoded(packet: bytes) -> Message:
    return tap.tap.decode(packet)
