"""The consumer's side of a TAP connection: applies what a peer sends to a store.

Theory of operation. A peer that sends TAP messages needs no connect: its first message makes the connection a consumer.
Messages are applied at once, in their order. A message is answered if it asks for that, or if it fails. A message
without hops left is refused, so that it does not circle in a ring of nodes forever.

This module decides what a message means; the sink applies it to the store.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from upriver.errors import InvalidArguments, KeyExists
from upriver.model import Event, VbucketState
from upriver.protocol.tap.flush_mark import FlushMark, mark_in
from upriver.wire import AnyResponse, Request, Response, tap
from upriver.wire.dialects.tap import Control, TapFlag


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedChange:
    """A received change, without a seqno, because TAP has none."""

    vbucket: int
    event: Event
    key: bytes
    value: bytes = b""
    flags: int = 0
    expiry: int = 0
    datatype: int = 0
    #: 0 if the peer sent none.
    cas: int = 0
    rev_seqno: int = 0
    #: The remaining hops.
    ttl: int


class TapSink(Protocol):
    """What a consumer needs of its store. Every method may raise a StatusError.

    ``peer`` is the connection that a message came over: a pending copy takes messages only from its takeover.
    """

    def store(self, change: ReceivedChange, peer: object) -> None:
        """Apply a change."""

    def start_over(self, vbucket: int, peer: object) -> None:
        """The vbucket is sent again from the start: a copy drops what it has."""

    def flush(self, mark: FlushMark | None, spared: frozenset[int], ttl: int, peer: object) -> None:
        """Empty the vbuckets that the mark lists, without a mark all, but not those that are spared.

        The flush may be passed on for ``ttl`` more hops. A mark that was seen before belongs to a flush that was
        applied already."""

    def set_state(self, vbucket: int, state: VbucketState, peer: object) -> None:
        """Change the role of a vbucket, which may not exist yet."""

    def online_update(self, control: Control) -> None:
        """Start, stop or revert an online update."""


class TapConsumer:
    """One connection on which a node receives TAP messages."""

    def __init__(
        self, sink: TapSink, now: float, on_unknown: Callable[[Control | None], object] = lambda _: None
    ) -> None:
        """``on_unknown`` learns of each control of another engine, which is ignored; None has no code at all."""
        self.sink = sink
        self._on_unknown = on_unknown
        self.created = now
        self.messages = 0
        self.changes = 0
        self.refused = 0
        #: The vbuckets that the peer has sent messages for, applied or refused.
        self.fed: set[int] = set()
        #: The vbuckets whose backfill has begun and not ended.
        self.backfilling: set[int] = set()
        #: The last checkpoint that began, by vbucket.
        self.checkpoints: dict[int, int] = {}
        #: What the peer has announced.
        self.peer_nacks = False
        self.peer_sends_checkpoints = False
        #: The peer has said that nothing more comes.
        self.finished = False
        #: The vbuckets that the peer treats as copies and that are active here.
        self._no_copies: set[int] = set()

    def receive(self, message: Request) -> Response | None:
        """Apply a message; return its answer if it asks for one. Raises a StatusError if it fails."""
        self.messages += 1
        try:
            self._check_hops(message)
            self._do(message)
        except Exception:
            self.refused += 1
            raise
        if TapFlag.ACK in message.tap_flags:  # type: ignore[attr-defined]
            return AnyResponse(opcode=message.code, opaque=message.opaque)
        return None

    @staticmethod
    def _check_hops(message: Request) -> None:
        if not message.ttl:  # type: ignore[attr-defined]
            raise InvalidArguments("the message has no hops left", vbucket=message.vbucket)

    def _do(self, message: Request) -> None:
        match message:
            case tap.Mutation():
                if TapFlag.NO_VALUE in message.tap_flags:
                    raise InvalidArguments("a mutation without its value cannot be stored", vbucket=message.vbucket)
                self._change(message, Event.MUTATION, message.value, message.flags, message.expiration)
            case tap.Delete():
                self._change(message, Event.DELETION)
            case tap.Flush():
                self._flush(message)
            case tap.SetVbucket():
                self._set_state(message)
            case tap.Opaque():
                self._control(message)
            case tap.CheckpointStart() | tap.NamedCheckpointStart():
                self._checkpoint(message)
            case _:
                raise InvalidArguments(f"{message.title()} is not a message for a consumer")

    def _change(
        self, message: tap.Mutation | tap.Delete, event: Event, value: bytes = b"", flags: int = 0, expiry: int = 0
    ) -> None:
        if message.vbucket in self._no_copies:
            raise KeyExists("the vbucket is active here and does not accept an older copy", vbucket=message.vbucket)
        self.fed.add(message.vbucket)
        self.sink.store(
            ReceivedChange(
                vbucket=message.vbucket,
                event=event,
                key=message.key,
                value=value,
                flags=flags,
                expiry=expiry,
                datatype=message.datatype,
                cas=message.cas,
                rev_seqno=message.rev_seqno or 0,
                ttl=message.ttl - 1,
            ),
            self,
        )
        self.changes += 1

    def _flush(self, message: tap.Flush) -> None:
        self.sink.flush(mark_in(message.private), frozenset(self._no_copies), message.ttl - 1, self)

    def _set_state(self, message: tap.SetVbucket) -> None:
        if not message.state.known:
            raise InvalidArguments(f"unknown vbucket state {int(message.state)}", vbucket=message.vbucket)
        self.fed.add(message.vbucket)
        try:
            self.sink.set_state(message.vbucket, VbucketState[message.state.name], self)
        except KeyExists:
            # A peer that does not wait for the answer sends its old copy behind it, which must not be merged.
            self._no_copies.add(message.vbucket)
            raise
        self._no_copies.discard(message.vbucket)

    def _control(self, message: tap.Opaque) -> None:
        match message.control:
            case Control.ENABLE_AUTO_NACK:
                self.peer_nacks = True
            case Control.ENABLE_CHECKPOINT_SYNC:
                self.peer_sends_checkpoints = True
            case Control.INITIAL_VBUCKET_STREAM:
                self.fed.add(message.vbucket)
                if not message.cas:  # of a backfill from a date a copy keeps what is older
                    self.sink.start_over(message.vbucket, self)
                self.backfilling.add(message.vbucket)
            case Control.CLOSE_BACKFILL:
                self.fed.add(message.vbucket)
                self.backfilling.discard(message.vbucket)
            case Control.OPEN_CHECKPOINT:
                self.fed.add(message.vbucket)
            case Control.CLOSE_TAP_STREAM:
                self.finished = True
            case Control.START_ONLINEUPDATE | Control.STOP_ONLINEUPDATE | Control.REVERT_ONLINEUPDATE:
                self.sink.online_update(message.control)
            case unknown:
                self._on_unknown(unknown)

    def _checkpoint(self, message: tap.CheckpointStart | tap.NamedCheckpointStart) -> None:
        self.fed.add(message.vbucket)
        is_end = isinstance(message, tap.CheckpointEnd | tap.NamedCheckpointEnd)
        if not is_end and message.checkpoint is not None:
            self.checkpoints[message.vbucket] = message.checkpoint
