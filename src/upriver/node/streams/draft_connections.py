"""Connections of the drafts, which know no open: what their first bytes make of a session.

The first two drafts have a header of their own. A connection that begins with the byte 0x01 speaks the second of them;
the first looks alike and is spoken where a listener is pinned to it. Neither has a login, so where users are configured
both are served only on a listener that is pinned to them and marked *anonymous*. Whoever sends bytes that cannot be
understood is told where they went wrong, and the connection is closed.

The third draft comes on the memcached header, and with its first request: a stream request where others open, or a
failover log request.
"""

from typing import TYPE_CHECKING, Final, cast

from upriver.errors import AuthenticationFailed, StatusError, WireError
from upriver.node.auth.users import Role
from upriver.node.options import SHORT_DRAFTS, ListenAddress
from upriver.node.session import Session, refusal
from upriver.protocol.producer import STREAM_DIALECTS, text_of
from upriver.wire import (
    DRAFT,
    MEMCACHED,
    AnyRequest,
    DraftOpcode,
    Framing,
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
    from upriver.node.streams.service import StreamConnection, StreamService

_NO_LOGIN: Final = AuthenticationFailed("the 12-byte drafts have no login: use a listener that is marked anonymous")


def begin(service: "StreamService", session: Session, first_byte: int) -> Framing:
    """Which header a connection has; one of the 12-byte drafts becomes a stream's connection at once."""
    name = session.listen_address.dialect
    if not name and first_byte == DraftOpcode.REQUEST:
        name = "upr_draft2"
    if name not in SHORT_DRAFTS:
        return MEMCACHED
    service.connect(session, STREAM_DIALECTS[name])
    if service.node.users is not None and not session.listen_address.anonymous:
        session.put(upr_draft1.RequestError(status=Status(_NO_LOGIN.status), text=text_of(_NO_LOGIN)).encode())
        service.close(session, str(_NO_LOGIN))
    return DRAFT


def begin_third(service: "StreamService", session: Session, packet: bytes) -> bool:
    """The third draft begins with its first request; False if the user may not stream, which is answered."""
    try:
        session.authorize(Role.STREAM)
    except StatusError as error:
        session.send(refusal(AnyRequest.decode(packet), error))
        return False
    service.connect(session, STREAM_DIALECTS[upr_draft3.upr_draft3.name])
    return True


def read_short(session: Session, packet: bytes) -> Message | None:
    """The request in a packet with the 12-byte header; None if it is none, which is the end of the connection."""
    stream = cast("StreamConnection", session.stream)
    try:
        message = stream.wire.decode(packet)
        if packet[0] != DraftOpcode.REQUEST:
            raise WireError(0, f"a request (opcode {int(DraftOpcode.REQUEST)})", f"a {message.title()}")
    except WireError as error:
        lose_place(session, error)
        return None
    stream.bytes_taken += len(packet)
    return message


def lose_place(session: Session, error: WireError) -> None:
    """Say where the bytes went wrong, counted from the first of the connection, and close it."""
    error = error.shifted(cast("StreamConnection", session.stream).bytes_taken)
    session.put(upr_draft1.DecodeError(offset=error.offset & 0xFFFFFFFF, text=str(error).encode()).encode())
    session.log.warning("closed: %s", error)
    session.closing = True


def admits(listen_address: ListenAddress, packet: bytes) -> bool:
    """Is this packet of a dialect that is spoken here? Plain commands are welcome everywhere."""
    if not listen_address.dialect or packet[0] != Magic.REQUEST:
        return True
    spoken = detect(packet)
    if spoken is memcached.memcached:
        return True
    if packet[1] == dcp.Open.declaration.opcode and spoken is dcp.dcp:  # an open is the same in both
        return listen_address.dialect in ("upr", "dcp")
    return spoken is not None and spoken.name == listen_address.dialect
