"""Numbers with names. The enumerations are open: a number without a name is kept, never lost."""

import enum
from typing import Any, Self


class OpenEnum(enum.IntEnum):
    """An enumeration of codes that also holds numbers without a name.

    An unknown number becomes a member called ``unknown(0x…)``, equal to that number. It is not stored,
    so a peer that sends every possible number costs no memory.
    """

    @classmethod
    def _missing_(cls, value: Any) -> Self | None:
        if not isinstance(value, int) or value < 0:
            return None
        member = int.__new__(cls, value)
        member._name_ = f"unknown(0x{value:02x})"
        member._value_ = value
        return member

    @property
    def known(self) -> bool:
        return self._value_ in type(self)._value2member_map_

    @property
    def label(self) -> str:
        """The name in plain words."""
        return self.name.lower().replace("_", " ")


class FlagSet(enum.IntFlag):
    """A set of bits that also keeps bits without a name.

    The standard library caches every combination that it has seen, so a peer that sends random bits would fill
    the memory. Combinations with unknown bits are removed from that cache; those of known bits are few.
    """

    @classmethod
    def _missing_(cls, value: Any) -> Any:
        member = super()._missing_(value)
        if int(member) & ~sum(int(flag) for flag in cls):
            cls._value2member_map_.pop(int(member), None)
        return member


def meaning_of(value: object) -> str:
    """The meaning of a code or a set of flags in words; empty for a plain number or bytes."""
    if isinstance(value, OpenEnum):
        return value.label
    if isinstance(value, enum.IntFlag):
        if not value:  # a dialect may name the absence of all flags, as UPR does: no flag means consumer
            return (value.name or "").lower().replace("_", " ")
        known = [flag for flag in type(value) if flag & value]
        words = [str(flag.name).lower().replace("_", " ") for flag in known]
        rest = int(value) & ~sum(int(flag) for flag in known)
        if rest:
            words.append(f"unknown(0x{rest:02x})")
        return ", ".join(words)
    return ""


class Magic(OpenEnum):
    """The first byte of a packet with the 24-byte header."""

    REQUEST = 0x80
    RESPONSE = 0x81


class Status(OpenEnum):
    """How a request ended."""

    SUCCESS = 0x00
    KEY_ENOENT = 0x01
    KEY_EEXISTS = 0x02
    E2BIG = 0x03
    EINVAL = 0x04
    NOT_STORED = 0x05
    DELTA_BADVAL = 0x06
    NOT_MY_VBUCKET = 0x07
    NO_BUCKET = 0x08
    LOCKED = 0x09
    NOT_LOCKED = 0x0E
    AUTH_ERROR = 0x20
    AUTH_CONTINUE = 0x21
    ERANGE = 0x22
    ROLLBACK = 0x23
    EACCESS = 0x24
    UNKNOWN_COMMAND = 0x81
    ENOMEM = 0x82
    NOT_SUPPORTED = 0x83
    EINTERNAL = 0x84
    EBUSY = 0x85
    ETMPFAIL = 0x86
    SYNC_WRITE_AMBIGUOUS = 0xA3


class Sender(enum.Enum):
    """The side that sends this kind of request."""

    CLIENT = "client"
    PRODUCER = "producer"
    CONSUMER = "consumer"
    MIGRATOR = "migrator"
    EITHER = "either side"
