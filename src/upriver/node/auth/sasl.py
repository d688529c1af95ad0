"""The messages of a SASL login.

A ``SaslExchange`` is one attempt of one connection: it takes bytes, returns a ``LoginOutcome`` and never raises.
Checking PLAIN derives a key, which takes milliseconds but releases the interpreter lock, so the node calls ``start``
and ``step`` in a thread.
"""

import enum
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from upriver.errors import UserError
from upriver.node.auth.users import User, prepared_name
from upriver.node.auth.users_file import Users
from upriver.scram import SCRAM, Credential, ScramError, ScramServer, WrongProof

#: The offered mechanisms, strongest first, in the spelling of Couchbase's clients.
MECHANISMS: Final = "SCRAM-SHA512 SCRAM-SHA256 SCRAM-SHA1 PLAIN"
#: Longer messages are refused unread, because the peer has not logged in yet.
MESSAGE_BYTES_MAX: Final = 4096
_SPELLINGS: Final = {
    b"PLAIN": "PLAIN",
    **{name.encode(): name for name in SCRAM},
    **{name.replace("SHA-", "SHA").encode(): name for name in SCRAM},
}


class SaslStatus(enum.Enum):
    """The state of a login."""

    SUCCESS = "success"
    CONTINUE = "continue"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class LoginOutcome:
    """The outcome of one message of the client."""

    status: SaslStatus
    #: For the client. Empty after a failure: the client learns no reason.
    challenge: bytes = b""
    user: User | None = None
    #: For the log: the name that the client claimed, if any, and what was wrong.
    name: str = ""
    why: str = ""


_WRONG = "wrong name or password"


class SaslExchange:
    """One login of one connection; ``start`` restarts it at any time."""

    def __init__(self, users: Users, nonce: Callable[[], str] = secrets.token_hex) -> None:
        self._users = users
        self._nonce = nonce
        self._name = ""
        self._expected: Callable[[bytes], LoginOutcome] | None = None

    def start(self, mechanism: bytes, initial: bytes) -> LoginOutcome:
        """Start with a mechanism and, if the client sent one, its first message."""
        self._name, self._expected = "", None
        known = _SPELLINGS.get(bytes(mechanism))
        if known is None:
            # Log only what looks like a mechanism: a client may have sent its password here by mistake.
            name = bytes(mechanism).decode("latin-1")
            told = f" {name}" if re.fullmatch(r"[A-Z0-9_-]{1,20}", name) else ""
            return self._failed(f"unknown mechanism{told}")
        self._expected = self._plain if known == "PLAIN" else partial(self._client_first, known)
        # RFC 4422, section 5.1: an empty challenge asks for a missing initial response.
        return self.step(initial) if initial else LoginOutcome(SaslStatus.CONTINUE)

    def step(self, data: bytes) -> LoginOutcome:
        """Take the client's next message."""
        expected, self._expected = self._expected, None
        if expected is None:
            return self._failed("no login is in progress")
        if len(data) > MESSAGE_BYTES_MAX:
            return self._failed(f"message of {len(data)} bytes, at most {MESSAGE_BYTES_MAX} are allowed")
        try:
            return expected(bytes(data))
        except UnicodeDecodeError:
            return self._failed("message is not UTF-8")

    def _plain(self, data: bytes) -> LoginOutcome:
        """RFC 4616: authorization identity, name and password, separated by NUL."""
        parts = data.decode().split("\0")
        if len(parts) != 3:
            return self._failed("malformed PLAIN message")
        acts_for, name, password = parts
        try:
            self._name = prepared_name(name)
        except UserError as error:
            return self._failed(error.why)
        if acts_for not in ("", name):
            return self._failed("acting for another user is not supported")
        user = self._users.verify_plain(self._name, password)
        return self._failed(_WRONG) if user is None else self._succeeded(user)

    def _client_first(self, mechanism: str, data: bytes) -> LoginOutcome:
        """RFC 5802, section 5: name and nonce; the reply is the node's nonce, the salt and the iterations."""
        try:
            server = ScramServer(mechanism, data.decode(), self._nonce())
        except ScramError as error:
            return self._failed(str(error))
        self._name = server.name
        credential = self._users.credential(self._name, mechanism)
        self._expected = partial(self._client_final, mechanism, server, credential)
        return LoginOutcome(SaslStatus.CONTINUE, server.challenge(credential).encode(), name=self._name)

    def _client_final(self, mechanism: str, server: ScramServer, kept: Credential, data: bytes) -> LoginOutcome:
        """RFC 5802, section 5: the client's proof; the reply proves that the node knows the user, too."""
        try:
            challenge = server.verify(data.decode()).encode()
        except WrongProof:
            return self._failed(_WRONG)
        except ScramError as error:
            return self._failed(str(error))
        user = self._users.get(self._name)
        if user is None or user.credentials[mechanism] != kept:
            return self._failed("the user was changed during the login")
        return self._succeeded(user, challenge)

    def _succeeded(self, user: User, challenge: bytes = b"") -> LoginOutcome:
        return LoginOutcome(SaslStatus.SUCCESS, challenge, user, user.name)

    def _failed(self, why: str) -> LoginOutcome:
        return LoginOutcome(SaslStatus.FAILED, name=self._name, why=why)
