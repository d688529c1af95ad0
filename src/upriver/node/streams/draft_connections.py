"""Connections of the drafts, which have no open.

The first two drafts have a header of 12 bytes. A connection whose first byte is 0x01 speaks the second draft. The first
draft looks the same; a listener must be pinned to it. A client may ask which of the two is spoken. Neither has a login.
Where users are configured, both are served only on a listener that is pinned to them and marked *anonymous*. Bytes that
cannot be understood are answered with their offset, and the connection is closed.

The third draft uses memcached's header. Its first request, a stream request or a failover log request, begins it.
"""

from typing import TYPE_CHECKING, Final

from upriver.errors import AuthenticationFailed, StatusError, WireError
from upriver.node.auth.users import Role
from upriver.node.options import SHORT_DRAFTS, ListenAddress
from upriver.node.packet_handlers import PacketHandler
from upriver.node.session import Session, malformed, refusal
from upriver.node.streams.stream_connection import StreamConnection
from upriver.protocol.producer import STREAM_DIALECTS, text_of
from upriver.wire import (
    DRAFT,
    AnyRequest,
    DraftOpcode,
    Magic,
    Message,
    Status,
    dcp,
    detect,
    memcached,
    upr_draft1,
    upr_draft3,
)

if TYPE_CHECKING:
    from upriver.node.streams.service import StreamService

_NO_LOGIN: Final = AuthenticationFailed("the 12-byte drafts have no login: use a listener that is marked anonymous")


class DraftFormat:
    """One connection of the first two drafts."""

    framing: Final = DRAFT

    def __init__(self, service: "StreamService", connection: StreamConnection) -> None:
        self._service = service
        self._connection = connection
        #: The offset of the next packet in the bytes of the connection.
        self._offset = 0

    def handle(self, session: Session, packet: bytes) -> None:
        """Answer a packet; anything but a request of a stream ends the connection."""
        try:
            message = self._request(packet)
        except WireError as error:
            self.close_on_wire_error(session, error)
            return
        self._offset += len(packet)
        if isinstance(message, upr_draft1.DialectRequest):
            session.put(self._dialect_answer(message).encode())
        elif not self._service.receive(session, message):
            self.close_on_wire_error(session, WireError(0, "a request", "a response"))

    def _request(self, packet: bytes) -> Message:
        message = self._connection.wire.decode(packet)
        if packet[0] != DraftOpcode.REQUEST:
            raise WireError(0, f"a request (opcode {int(DraftOpcode.REQUEST)})", f"a {message.title()}")
        return message

    def _dialect_answer(self, request: upr_draft1.DialectRequest) -> Message:
        spoken = self._connection.wire.name
        if spoken == f"upr_draft{request.draft}":
            return upr_draft1.Ok(request_id=request.request_id)
        text = f"{spoken} is spoken here, not upr_draft{request.draft}"
        return upr_draft1.RequestError(request_id=request.request_id, status=Status.EINVAL, text=text.encode())

    def close_on_wire_error(self, session: Session, error: WireError) -> None:
        """Answer with the offset of the error, counted from the connection's first byte, and close it."""
        error = error.shifted(self._offset)
        session.put(upr_draft1.DecodeError(offset=error.offset & 0xFFFFFFFF, text=str(error).encode()).encode())
        session.log.warning("closed: %s", error)
        session.closing = True


class ListenerDialect(PacketHandler):
    """Refuses packets of other dialects where a listener is pinned to one."""

    def handle(self, session: Session, packet: bytes) -> bool:
        """Refuse the packet if the listener does not speak its dialect."""
        if admits(session.listen_address, packet):
            return False
        wanted = f"a packet of {session.listen_address.dialect}, as is spoken here"
        session.send(malformed(packet, WireError(1, wanted, "one of another dialect")))
        return True


def claim(service: "StreamService", session: Session, first_byte: int) -> DraftFormat | None:
    """Make a connection of a 12-byte draft a stream's connection at once; None if it is of another dialect."""
    name = session.listen_address.dialect
    if not name and first_byte == DraftOpcode.REQUEST:
        name = "upr_draft2"
    if name not in SHORT_DRAFTS:
        return None
    connection = service.connect(session, STREAM_DIALECTS[name])
    if service.node.users is not None and not session.listen_address.anonymous:
        session.put(upr_draft1.RequestError(status=Status(_NO_LOGIN.status), text=text_of(_NO_LOGIN)).encode())
        service.close(session, str(_NO_LOGIN))
    return DraftFormat(service, connection)


def begin_third(service: "StreamService", session: Session, packet: bytes) -> bool:
    """Make a session a connection of the third draft; refuse it and return False if the user may not stream."""
    try:
        session.authorize(Role.STREAM)
    except StatusError as error:
        session.send(refusal(AnyRequest.decode(packet), error))
        return False
    service.connect(session, STREAM_DIALECTS[upr_draft3.upr_draft3.name])
    return True


def admits(listen_address: ListenAddress, packet: bytes) -> bool:
    """Whether a listener speaks the packet's dialect. Plain commands, and responses, are taken everywhere."""
    if not listen_address.dialect or packet[0] != Magic.REQUEST:
        return True
    spoken = detect(packet)
    if spoken is memcached.memcached:
        return True
    if packet[1] == dcp.Open.declaration.opcode and spoken is dcp.dcp:  # an open is the same in both
        return listen_address.dialect in ("upr", "dcp")
    return spoken is not None and spoken.name == listen_address.dialect
