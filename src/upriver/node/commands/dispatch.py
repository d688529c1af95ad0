"""Runs the command of a memcached request: the last of the packet handlers, which takes everything that is left."""

from typing import Final

from upriver.errors import InvalidArguments, KeyExists, KeyNotFound, NotStored, UnknownCommand, WireError
from upriver.node.auth.users import Role
from upriver.node.commands.keyvalue import refused_when_durable
from upriver.node.packet_handlers import PacketHandler
from upriver.node.session import Answer, Session, header_refusal, malformed
from upriver.wire import MEMCACHED, AnyRequest, Magic, Request, Status, memcached

#: Requests that carry lists, and their longest body. Each entry of a list becomes an object.
_LIST_BYTES_MAX: Final = {memcached.Observe.declaration.opcode: 16 * 1024, memcached.Hello.declaration.opcode: 1024}
#: This many bytes of a list count as one unit of work.
_LIST_BYTES_PER_WORK: Final = 16


class CommandHandler(PacketHandler):
    """Takes every packet."""

    def handle(self, session: Session, packet: bytes) -> bool:
        """Decode the request and run its command."""
        if packet[0] != Magic.REQUEST:  # two peers that answer each other's answers would never stop
            session.close_on_wire_error(WireError(0, "a request", "a response"))
            return True
        bytes_max = _LIST_BYTES_MAX.get(packet[1])
        if bytes_max is not None:
            if len(packet) - MEMCACHED.header_size > bytes_max:
                text = f"a list of more than {bytes_max} bytes: ask for less at once"
                session.send(header_refusal(packet, 0, Status.E2BIG, text))
                return True
            session.charge(len(packet) // _LIST_BYTES_PER_WORK)
        try:
            request = memcached.memcached.decode(packet)
        except WireError as error:
            session.send(malformed(packet, error))
            return True
        assert isinstance(request, Request)
        session.run(request, run_command)
        return True


def run_command(session: Session, request: Request) -> Answer:
    """Run the command of a request, if there is one and the user has its role."""
    entry = session.node.commands.get(type(request))
    if entry is None:
        if isinstance(request, AnyRequest):
            raise UnknownCommand(f"there is no command 0x{request.opcode:02x}")
        raise UnknownCommand
    command, role = entry
    if role is not None:
        session.authorize(role)
    if request.datatype and request.datatype & ~session.datatypes:
        raise InvalidArguments(f"the data type 0x{request.datatype:02x} was not agreed on in a hello")
    try:
        return command(session, request)
    except (KeyExists, KeyNotFound, NotStored) as error:
        key = getattr(request, "key", None)
        if role != Role.WRITE or key is None or session.node.bucket.ack == "memory":
            raise
        return refused_when_durable(session, request, key, error)
