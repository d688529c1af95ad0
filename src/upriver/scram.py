"""SCRAM logins (RFC 5802, RFC 7677), for both sides, without channel binding.

The client sends its name and a nonce; the server replies with its own nonce, the salt and the number of hashing rounds.
The client then proves that it knows the password, and the server proves that it knows the user. Neither side sends the
password, and the server does not store it.
"""

import base64
import hashlib
import hmac
import re
import reprlib
import secrets
import stringprep
import unicodedata
from collections.abc import Callable
from typing import Final, NamedTuple

_HASHES: Final = {"SCRAM-SHA-1": "sha1", "SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
#: The mechanisms by their RFC names, and the length of their hashes.
DIGEST_BYTES: Final = {name: hashlib.new(used).digest_size for name, used in _HASHES.items()}
SCRAM: Final = tuple(_HASHES)
ITERATIONS_MIN: Final = 4096
ITERATIONS_MAX: Final = 10_000_000
SALT_BYTES_MIN: Final = 12
_SALT_BYTES: Final = 32

_VALUE: Final = r"[^,\0]+"
#: Attributes that no RFC defines may follow; both sides include them in the proof.
_MORE: Final = rf"(?:,(?![aceimnprsv])[A-Za-z]={_VALUE})*"
_CLIENT_FIRST: Final = re.compile(rf"n=(?P<name>{_VALUE}),r=(?P<nonce>{_VALUE}){_MORE}")
_SERVER_FIRST: Final = re.compile(rf"r=(?P<nonce>{_VALUE}),s=(?P<salt>{_VALUE}),i=(?P<rounds>[1-9][0-9]{{0,8}}){_MORE}")
_CLIENT_FINAL: Final = re.compile(
    rf"(?P<unproven>c=(?P<binding>{_VALUE}),r=(?P<nonce>{_VALUE}){_MORE}),p=(?P<proof>{_VALUE})"
)
_SERVER_FINAL: Final = re.compile(rf"v=(?P<signature>{_VALUE}){_MORE}")
#: RFC 5802 allows no space in a nonce, but Couchbase's C++ client sends ``0x04 0xffffff88 …``. Only commas matter.
_NONCE: Final = re.compile(r"[ -+\--~]+")

#: RFC 4013, section 2.3.
_PROHIBITED: Final[tuple[tuple[Callable[[str], bool], str], ...]] = (
    (stringprep.in_table_a1, "unassigned code points"),
    (stringprep.in_table_c12, "non-ASCII spaces"),
    (stringprep.in_table_c21_c22, "control characters"),
    (stringprep.in_table_c3, "private use characters"),
    (stringprep.in_table_c4, "non-character code points"),
    (stringprep.in_table_c5, "surrogate codes"),
    (stringprep.in_table_c6, "characters that are not plain text"),
    (stringprep.in_table_c7, "characters that are not canonical"),
    (stringprep.in_table_c8, "characters that change the display"),
    (stringprep.in_table_c9, "tagging characters"),
)


class ScramError(ValueError):
    """A message, name or password that SCRAM does not allow."""


class WrongProof(ScramError):
    """The peer does not know the password."""


class Credential(NamedTuple):
    """What a server stores to check a password (RFC 5802, section 3)."""

    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int

    @classmethod
    def create(cls, mechanism: str, password: str, iterations: int, salt: bytes | None = None) -> "Credential":
        """Derive the credential of a password, with a random salt unless one is given. This takes milliseconds."""
        salt = secrets.token_bytes(_SALT_BYTES) if salt is None else salt
        if len(salt) < SALT_BYTES_MIN:
            raise ScramError(f"the salt has {len(salt)} bytes; at least {SALT_BYTES_MIN} are needed")
        if not ITERATIONS_MIN <= iterations <= ITERATIONS_MAX:
            raise ScramError(f"{iterations} hashing rounds; use {ITERATIONS_MIN} to {ITERATIONS_MAX}")
        keys = _Keys(mechanism, saslprep(password), salt, iterations)
        return cls(salt, keys.stored, keys.server, iterations)


class ScramServer:
    """The server's side of one login."""

    def __init__(self, mechanism: str, client_first: str, nonce: str) -> None:
        """Read the client's first message; ``nonce`` is the server's."""
        flag, _, rest = client_first.partition(",")
        authorized, comma, bare = rest.partition(",")
        if not comma:
            raise ScramError("malformed first message")
        if flag.startswith("p="):
            raise ScramError("channel binding is not supported")
        if flag not in ("n", "y"):
            raise ScramError("invalid GS2 flag; use n or y")
        if authorized:
            raise ScramError("an authzid is not supported")
        found = _parsed(_CLIENT_FIRST, bare, "first")
        #: The name that the client claims, prepared by ``saslprep``.
        self.name = _unescaped(found["name"])
        self._hash = _HASHES[mechanism]
        self._binding = f"{flag},,".encode()
        self._nonce = _checked_nonce(found["nonce"]) + nonce
        self._client_first = bare
        self._server_first = ""
        self._credential: Credential

    def challenge(self, credential: Credential) -> str:
        """Return the server's first message, for the credential of ``name``."""
        self._credential = credential
        self._server_first = f"r={self._nonce},s={_text(credential.salt)},i={credential.iterations}"
        return self._server_first

    def verify(self, client_final: str) -> str:
        """Check the client's proof and return the server's; ``WrongProof`` if the password is wrong."""
        found = _parsed(_CLIENT_FINAL, client_final, "final")
        binding, proof = _binary(found["binding"], "channel binding"), _binary(found["proof"], "proof")
        if binding != self._binding:
            raise ScramError("the channel bindings do not match")
        if found["nonce"] != self._nonce:
            raise ScramError("the nonce does not match")
        message = ",".join((self._client_first, self._server_first, found["unproven"])).encode()
        signature = hmac.digest(self._credential.stored_key, message, self._hash)
        if len(proof) != len(signature):
            raise WrongProof("the proof has the wrong length")
        client_key = _xor(signature, proof)
        if not hmac.compare_digest(hashlib.new(self._hash, client_key).digest(), self._credential.stored_key):
            raise WrongProof("the proof is wrong")
        return f"v={_text(hmac.digest(self._credential.server_key, message, self._hash))}"


class ScramClient:
    """The client's side of one login."""

    def __init__(self, mechanism: str, name: str, password: str, nonce: str | None = None) -> None:
        escaped = saslprep(name).replace("=", "=3D").replace(",", "=2C")
        if not escaped:
            raise ScramError("the name is empty")
        self._mechanism = mechanism
        self._password = saslprep(password)
        self._nonce = secrets.token_hex() if nonce is None else nonce
        self._bare = f"n={escaped},r={self._nonce}"
        self._signature = b""
        #: The client's first message.
        self.first = f"n,,{self._bare}"

    def final(self, server_first: str, iterations_max: int = ITERATIONS_MAX) -> str:
        """Return the client's proof. This takes milliseconds."""
        found = _parsed(_SERVER_FIRST, server_first, "first")
        nonce, salt, rounds = _checked_nonce(found["nonce"]), _binary(found["salt"], "salt"), int(found["rounds"])
        if not ITERATIONS_MIN <= rounds <= iterations_max:
            raise ScramError(f"{rounds} hashing rounds; {ITERATIONS_MIN} to {iterations_max} are allowed")
        if not nonce.startswith(self._nonce) or nonce == self._nonce:
            raise ScramError("the nonce does not match")
        if len(salt) < SALT_BYTES_MIN:
            raise ScramError(f"the salt has {len(salt)} bytes; at least {SALT_BYTES_MIN} are needed")
        keys = _Keys(self._mechanism, self._password, salt, rounds)
        unproven = f"c={_text(b'n,,')},r={nonce}"
        message = ",".join((self._bare, server_first, unproven)).encode()
        self._signature = hmac.digest(keys.server, message, _HASHES[self._mechanism])
        proof = _xor(keys.client, hmac.digest(keys.stored, message, _HASHES[self._mechanism]))
        return f"{unproven},p={_text(proof)}"

    def verify(self, server_final: str) -> None:
        """Check the server's proof."""
        found = _parsed(_SERVER_FINAL, server_final, "final")
        if not self._signature or not hmac.compare_digest(_binary(found["signature"], "signature"), self._signature):
            raise WrongProof("the signature is wrong")


def saslprep(text: str) -> str:
    """Return the one form of a text that has several in Unicode (RFC 4013)."""
    mapped = "".join(" " if stringprep.in_table_c12(c) else c for c in text if not stringprep.in_table_b1(c))
    prepared = unicodedata.ucd_3_2_0.normalize("NFKC", mapped)
    for prohibited, what in _PROHIBITED:
        if any(map(prohibited, prepared)):
            raise ScramError(f"{what} are not allowed")
    # RFC 3454, section 6: text from right to left starts and ends so, and has no letter from left to right.
    if any(map(stringprep.in_table_d1, prepared)):
        if any(map(stringprep.in_table_d2, prepared)):
            raise ScramError("text in both directions is not allowed")
        if not (stringprep.in_table_d1(prepared[0]) and stringprep.in_table_d1(prepared[-1])):
            raise ScramError("right-to-left text must start and end with a right-to-left character")
    return prepared


class _Keys:
    """The keys that follow from a prepared password (RFC 5802, section 3)."""

    def __init__(self, mechanism: str, password: str, salt: bytes, iterations: int) -> None:
        used = _HASHES[mechanism]
        salted = hashlib.pbkdf2_hmac(used, password.encode(), salt, iterations)
        self.client = hmac.digest(salted, b"Client Key", used)
        self.stored = hashlib.new(used, self.client).digest()
        self.server = hmac.digest(salted, b"Server Key", used)


def _parsed(form: re.Pattern[str], text: str, which: str) -> dict[str, str]:
    names = [part[:2] for part in text.split(",")]
    if "m=" in names:
        raise ScramError("the attribute m is not supported")
    if names[0] == "e=" and form in (_SERVER_FIRST, _SERVER_FINAL):
        raise ScramError(f"the server reports {text[2:].partition(',')[0]!r}")
    found = form.fullmatch(text)
    if found is None or len(set(names)) < len(names):
        raise ScramError(f"malformed {which} message")
    return found.groupdict()


def _unescaped(name: str) -> str:
    if re.search(r"=(?!3D|2C)", name):
        raise ScramError("a name must have =3D for = and =2C for a comma")
    prepared = saslprep(name.replace("=2C", ",").replace("=3D", "="))
    if not prepared:
        raise ScramError("the name is empty")
    return prepared


def _checked_nonce(nonce: str) -> str:
    if not _NONCE.fullmatch(nonce):
        raise ScramError(f"the nonce {reprlib.repr(nonce)} is not allowed; use printable ASCII without commas")
    return nonce


def _xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _binary(text: str, what: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise ScramError(f"the {what} is not in base64") from None
