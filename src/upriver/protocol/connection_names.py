"""The names of a node's peers.

Names appear in statistics, in the log and in files. So they are short and readable, and two different names never look
the same.
"""

from typing import Final

from upriver.errors import InvalidArguments

#: Room for a mover's name with a host name in it. Deployed servers take 200 bytes.
NAME_BYTES_MAX: Final = 500
_TAP: Final = "tap:"


def checked_name(name: bytes) -> str:
    """Return a name as text. Refuse an empty name and one that is too long."""
    if not name:
        raise InvalidArguments("the name of the connection is empty")
    if len(name) > NAME_BYTES_MAX:
        raise InvalidArguments(f"the name has {len(name)} bytes, the maximum is {NAME_BYTES_MAX}")
    return readable(name)


def readable(name: bytes) -> str:
    r"""Return bytes as text, a different text for different bytes: invalid UTF-8 becomes ``\xff``, a backslash is
    doubled."""
    return name.replace(b"\\", rb"\\").decode(errors="backslashreplace")


def made_up(name: str) -> str:
    r"""Return a name that the node makes up and no peer can send: in a peer's name a single backslash appears only
    before ``xff``."""
    assert name[0] not in "x\\"
    return f"\\{name}"


def successor_by_tap(name: str) -> str:
    """The successor of a vbucket that is handed over to a TAP client of this name; stored on disk."""
    return f"{_TAP}{name}"


def successor_by_open(name: str) -> str:
    """The successor of a vbucket that is handed over to an open connection of this name. It never equals that of a TAP
    client."""
    return made_up(name) if name.startswith(_TAP) else name
