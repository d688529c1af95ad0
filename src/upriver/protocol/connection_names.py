"""The names under which the peers of a node are known.

They stand in statistics, in the log and in files, whoever made them up. So they are short, readable, and no two of them
are taken for one.
"""

from typing import Final

from upriver.errors import InvalidArguments

#: Room for what a mover calls itself, with the name of a host in it. Deployed servers take 200.
NAME_BYTES_MAX: Final = 500
_TAP: Final = "tap:"


def checked_name(name: bytes) -> str:
    """A name as text. An empty one is refused, and one that is too long."""
    if not name:
        raise InvalidArguments("a connection needs a name")
    if len(name) > NAME_BYTES_MAX:
        raise InvalidArguments(f"a name has at most {NAME_BYTES_MAX} bytes, this one has {len(name)}")
    return readable(name)


def readable(name: bytes) -> str:
    r"""Bytes as text, each in its own way: what is no UTF-8 becomes ``\xff``, and a backslash is doubled."""
    return name.replace(b"\\", rb"\\").decode(errors="backslashreplace")


def made_up(name: str) -> str:
    r"""A name that a node makes up and no peer can tell: a single backslash stands in those only before ``xff``."""
    assert name[0] not in "x\\"
    return f"\\{name}"


def successor_by_tap(name: str) -> str:
    """For whom a vbucket dies that is handed over to a TAP client of this name; it is kept on disk."""
    return f"{_TAP}{name}"


def successor_by_open(name: str) -> str:
    """The same for a connection that was opened: it can call itself what it likes, and yet is no TAP client."""
    return made_up(name) if name.startswith(_TAP) else name
