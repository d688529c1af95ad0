"""A raw socket that plays mover and producer for a node that consumes."""

from tests.support.stream_client import Served, StreamClient
from upriver.errors import UpriverError
from upriver.model import VbucketState
from upriver.wire import AnyResponse, Message, Request, Response, Status, dcp, memcached, upr

#: The failover log of the producer.
LOG = (memcached.FailoverEntry(vbucket_uuid=7, seqno=0),)


class MoverSocket(StreamClient):
    """A connection on which the node consumes, and the stream that was added last."""

    def __init__(self, node: Served, name: bytes = b"move", *, port: int = 0) -> None:
        super().__init__(node, name, flags=0, port=port)
        self.opaque = 0

    def add_stream(
        self,
        vbucket: int = 0,
        *,
        takeover: bool = False,
        speaks: str = "dcp",
        log: tuple[memcached.FailoverEntry, ...] = LOG,
    ) -> list[Message]:
        """Add a stream and accept its request in a dialect; everything that the node sent before it was added."""
        flags = upr.AddStreamFlag.TAKEOVER if takeover else upr.AddStreamFlag(0)
        self.send(upr.AddStream(vbucket=vbucket, opaque=1, flags=flags))
        sent: list[Message] = []
        while True:
            message = self.next()
            assert message is not None
            sent.append(message)
            match message:
                case dcp.Control():
                    self.send(AnyResponse(opcode=message.code, opaque=message.opaque))
                case upr.FailoverLogRequest():
                    self.send(upr.FailoverLogResponse(log=log, opaque=message.opaque))
                case dcp.StreamRequest() if speaks == "upr":
                    self.send(AnyResponse(opcode=message.code, opaque=message.opaque, status=Status.EINVAL))
                case dcp.StreamRequest() | upr.StreamRequest():
                    self.send(upr.StreamRequestResponse(log=log, opaque=message.opaque))
                case upr.AddStreamResponse():
                    self.opaque = message.stream_opaque
                    return sent
                case Response():
                    raise UpriverError(f"the stream was refused: {message}")

    def tell(self, *messages: Request, vbucket: int = 0) -> None:
        """Send messages of the stream."""
        for message in messages:
            message.vbucket, message.opaque = vbucket, self.opaque
        self.send(*messages)

    def set_state(self, state: VbucketState | int, vbucket: int = 0) -> Status:
        """Tell the node to change the role of its copy, and return the status of its answer."""
        code = upr.VbucketState[state.name] if isinstance(state, VbucketState) else upr.VbucketState(state)
        self.tell(upr.SetVbucketState(state=code), vbucket=vbucket)
        while True:
            answer = self.next()
            assert answer is not None
            if isinstance(answer, Response) and answer.code == upr.SetVbucketState.declaration.opcode:
                return answer.status
