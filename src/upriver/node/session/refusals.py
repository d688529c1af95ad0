"""Answers that refuse a request."""

from upriver.errors import StatusError, WireError
from upriver.wire import AnyResponse, Buffer, Request, Status


def refusal(request: Request, error: StatusError) -> AnyResponse:
    """The answer that refuses a request: CAS 0, no extras, always a text."""
    text = error.detail or error.text
    return AnyResponse(opcode=request.code, status=Status(error.status), opaque=request.opaque, value=text.encode())


def malformed(packet: bytes, error: WireError) -> AnyResponse:
    """The refusal of a packet with a valid header and an invalid body."""
    return header_refusal(packet, 0, Status.EINVAL, str(error))


def header_refusal(data: Buffer, at: int, status: Status, text: str) -> AnyResponse:
    """A refusal made from the header of the request only."""
    opaque = int.from_bytes(data[at + 12 : at + 16], "big")
    return AnyResponse(opcode=data[at + 1], status=status, opaque=opaque, value=text.encode())
