"""A connection of the consumer type: feeds a node's replicas.

The mover at the other end says which streams to add and to close, and relays what the producer sends. *Add stream* is
answered when the producer has answered, with its status, so the mover learns everything from one side.
"""

from collections.abc import Callable
from typing import Final

from upriver.errors import StatusError
from upriver.protocol.consumer.consumer import ConsumerConnection, ConsumerOptions
from upriver.protocol.consumer.consumer_stream import ConsumerStream, Run
from upriver.protocol.consumer.sink import Sink
from upriver.wire import AnyResponse, Buffer, Message, Request, Status, dcp, upr

#: Messages for producers only: they end the connection.
_OF_PRODUCERS: Final = (dcp.StreamRequest, upr.StreamRequest, upr.FailoverLogRequest, dcp.Control, dcp.BufferAck)


class Replica:
    """One open connection of the consumer type."""

    def __init__(
        self,
        sink: Sink,
        now: float,
        options: ConsumerOptions | None = None,
        on_output: Callable[[], object] | None = None,
        on_end: Callable[[ConsumerStream], object] | None = None,
        on_refusal: Callable[[int, StatusError], object] | None = None,
    ) -> None:
        """``on_refusal`` is called with the vbucket and the reason when a stream is not added."""
        self.on_refusal = on_refusal
        self.consumer = ConsumerConnection(sink, now, options, on_output=on_output, on_end=on_end)
        self._closing = ""
        self._answers: list[bytes] = []
        self.bytes_sent_total = 0

    @property
    def closing(self) -> str:
        """Why the connection is to be closed; empty if it is not."""
        return self._closing or self.consumer.closing

    @property
    def full(self) -> bool:
        """There was no room for the last run: wait, call ``go_on`` and give the rest again."""
        return self.consumer.full

    def go_on(self) -> None:
        """There may be room again."""
        self.consumer.go_on()

    def role_changed(self, vbucket: int) -> None:
        """A copy changed role."""
        self.consumer.role_changed(vbucket)

    # Coming in

    def receive_runs(self, data: Buffer, at: int, now: float) -> tuple[int, list[Run]]:
        """Take the changes that start at ``at``: where they end, and the runs that were taken."""
        return self.consumer.receive_runs(data, at, now)

    def receive(self, message: Message, now: float) -> bool:
        """Take a message; False if it does not belong to streams, so that the caller may answer it."""
        match message:
            case upr.AddStream():
                self._add_stream(message)
            case upr.CloseStream():
                self._close_stream(message)
            case dcp.Open() | upr.Open():
                self._closing = "the connection was opened twice"
            case _ if type(message) in _OF_PRODUCERS:
                self._closing = f"a consumer does not accept {message.title()}"
            case _:
                return self.consumer.receive(message, now)
        return True

    def _add_stream(self, request: upr.AddStream) -> None:
        def answered(stream: ConsumerStream, error: StatusError | None) -> None:
            if error is None:
                self._send(upr.AddStreamResponse(stream_opaque=stream.opaque, opaque=request.opaque))
            else:
                refused(error)

        def refused(error: StatusError) -> None:
            self._refuse(request, error)
            if self.on_refusal is not None:
                self.on_refusal(request.vbucket, error)

        try:
            self.consumer.add_stream(request.vbucket, answered, flags=int(request.flags & upr.AddStreamFlag.TAKEOVER))
        except StatusError as error:
            refused(error)

    def _close_stream(self, request: upr.CloseStream) -> None:
        try:
            self.consumer.close_stream(request.vbucket, told=True)
        except StatusError as error:
            self._refuse(request, error)
        else:
            self._send(AnyResponse(opcode=request.code, opaque=request.opaque))

    def _refuse(self, request: Request, error: StatusError) -> None:
        text = (error.detail or error.text).encode()
        self._send(AnyResponse(opcode=request.code, opaque=request.opaque, status=Status(error.status), value=text))

    # Going out

    def _send(self, message: Message) -> None:
        self._answers.append(message.encode())

    def data_to_send(self) -> bytes:
        """The bytes to send; each is returned once."""
        out = b"".join((*self._answers, self.consumer.data_to_send()))
        self._answers.clear()
        self.bytes_sent_total += len(out)
        return out

    @property
    def deadline(self) -> float | None:
        """When to call ``tick``; None for never."""
        return self.consumer.deadline

    def tick(self, now: float) -> None:
        """Time has passed."""
        self.consumer.tick(now)

    def lose(self) -> None:
        """The connection is lost."""
        self.consumer.lose()
