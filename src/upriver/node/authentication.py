"""Who may use the node: users and their roles, the SASL exchange, and the delay after failed logins.

Theory of operation. The file of users holds no password, only what a SCRAM server needs to check one (RFC 5802,
section 3): a salt, an iteration count and two keys for each hash. PLAIN is checked against the same keys. A
``SaslExchange`` is one attempt of one connection: bytes in, an ``Outcome`` out. Nothing that a client sends raises.

Nobody learns from the node whether a name exists. An unknown name gets a decoy: a salt that follows from the name and
from a key kept in the file, so that it stays the same when one asks twice or after a restart, and keys to which no
password belongs. The exchange then takes the same steps and the same work as with a wrong password.

Checking PLAIN derives a key, which takes milliseconds but releases the interpreter lock: a server with other
connections to serve calls ``start`` and ``step`` in a thread.
"""

import base64
import contextlib
import enum
import fcntl
import functools
import hashlib
import hmac
import importlib.util
import ipaddress
import json
import os
import re
import secrets
import tempfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from upriver.errors import UserError, UsersFileError

#: What the node offers, strongest first, spelled as Couchbase's clients spell it.
MECHANISMS = "SCRAM-SHA512 SCRAM-SHA256 SCRAM-SHA1 PLAIN"

#: Couchbase's own default. More would slow down every connect of every client, which derive the key each time.
ITERATIONS = 15_000
ITERATIONS_MIN = 4096
ITERATIONS_MAX = 10_000_000
SALT_BYTES_MIN = 12
NAME_BYTES_MAX = 128
PASSWORD_BYTES_MAX = 1024
#: Longer messages are refused unread: nobody has logged in yet.
MESSAGE_BYTES_MAX = 4096


def _scram_mechanism() -> Any:
    """scramp's ``ScramMechanism``, but with spaces allowed in a nonce.

    Couchbase's C++ client, on which most of its SDKs are built, writes its nonce as ``0x04 0xffffff88 …``. RFC 5802
    allows no space there, and scramp insists; a space is harmless, because only commas separate attributes. The rule is
    loosened in a copy of the module: others in this process may use scramp, too, and get what they expect.
    """
    spec = importlib.util.find_spec("scramp.core")
    assert spec is not None
    assert spec.loader is not None
    core: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(core)

    class Nonce(core.Nonce):  # type: ignore[misc]
        def __init__(self, nonce: str) -> None:
            super().__init__(nonce.replace(" ", "_"))
            self.nonce = nonce

    core.Nonce = Nonce
    return core.ScramMechanism


class _Scramp:
    """What is used of scramp, which is imported when the first user or login needs it: it costs a node without users a
    fifth of a second."""

    def __init__(self) -> None:
        scramp, utils = importlib.import_module("scramp"), importlib.import_module("scramp.utils")
        self.error: type[Any] = scramp.ScramException
        self.invalid_proof = utils.ServerError.INVALID_PROOF
        self.saslprep: Callable[[str], str] = utils.saslprep
        mechanism = _scram_mechanism()
        self.mechanisms: Mapping[str, Any] = {name: mechanism(name) for name in _SCRAM}


@functools.cache
def _scramp() -> _Scramp:
    return _Scramp()


_SCRAM = ("SCRAM-SHA-1", "SCRAM-SHA-256", "SCRAM-SHA-512")
_DIGEST_BYTES = {"SCRAM-SHA-1": 20, "SCRAM-SHA-256": 32, "SCRAM-SHA-512": 64}
#: PLAIN is checked with the strongest hash.
_PLAIN_CHECK = "SCRAM-SHA-512"
_SPELLINGS = {
    b"PLAIN": "PLAIN",
    **{name.encode(): name for name in _SCRAM},
    **{name.replace("SHA-", "SHA").encode(): name for name in _SCRAM},
}


# Users


class Role(enum.Flag):
    """What a user may do: ``Role.READ in user.roles``."""

    READ = 1
    WRITE = 2
    STREAM = 4
    #: A bit of its own and all the others: an administrator may do everything.
    ADMIN = 15

    @classmethod
    def named(cls, names: Iterable[str]) -> "Role":
        """The roles of these names together; at least one."""
        roles = cls(0)
        for name in names:
            if name not in _ROLES:
                raise UserError(f"there is no role {name!r}: choose from {', '.join(_ROLES)}")
            roles |= _ROLES[name]
        if not roles:
            raise UserError(f"no role given: choose from {', '.join(_ROLES)}")
        return roles

    @property
    def names(self) -> list[str]:
        """The names that ``named`` takes."""
        if Role.ADMIN in self:
            return ["admin"]
        return [name for name, role in _ROLES.items() if role in self]


_ROLES = {"read": Role.READ, "write": Role.WRITE, "stream": Role.STREAM, "admin": Role.ADMIN}


class Credential(NamedTuple):
    """What a SCRAM server keeps of a password, in the order in which scramp takes it."""

    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int


@dataclass(frozen=True, slots=True)
class User:
    """A name, what it may do, and how to check its password."""

    name: str
    roles: Role
    #: By RFC name of the mechanism.
    credentials: Mapping[str, Credential] = field(repr=False)

    @classmethod
    def create(
        cls, name: str, password: str, roles: Role, *, iterations: int = ITERATIONS, salt: bytes | None = None
    ) -> "User":
        """A new user; every mechanism gets a random salt of its own unless one is given."""
        name = prepared_name(name)
        if not password:
            raise UserError("needs a password that is not empty", name)
        if len(password.encode(errors="surrogatepass")) > PASSWORD_BYTES_MAX:
            raise UserError(f"has a password of more than {PASSWORD_BYTES_MAX} bytes", name)
        try:
            mechanisms = _scramp().mechanisms.items()
            made = {key: Credential(*scram.make_auth_info(password, iterations, salt)) for key, scram in mechanisms}
        except _scramp().error as error:
            raise UserError(f"cannot have this password: {error.args[0]}", name) from None
        return cls(name, roles, made)


def prepared_name(name: str) -> str:
    """The one form of a name that has several in Unicode (RFC 4013)."""
    try:
        prepared = str(_scramp().saslprep(name))
    except _scramp().error as error:
        raise UserError(f"cannot have this name: {error.args[0]}", name) from None
    if not prepared:
        raise UserError("needs a name that is not empty", name)
    if len(prepared.encode()) > NAME_BYTES_MAX:
        raise UserError(f"has a name of more than {NAME_BYTES_MAX} bytes", name[:NAME_BYTES_MAX])
    return prepared


class Users:
    """The users of a node, in memory and in a file."""

    def __init__(self, path: Path | None = None, *, decoy_key: bytes | None = None) -> None:
        self.path = path
        self._by_name: dict[str, User] = {}
        self._decoy_key = secrets.token_bytes(32) if decoy_key is None else decoy_key
        self._decoy_iterations = ITERATIONS
        self._seen: _Fingerprint | None = None

    @classmethod
    def load(cls, path: Path) -> Self:
        """The users of a file; ``UsersFileError`` says what is wrong with it."""
        if not path.exists():
            why = f"No such file or directory: make it by `upriver user add NAME --roles read,write --users {path}`"
            raise UsersFileError(str(path), why)
        users = cls(path)
        users._read(path)
        return users

    @classmethod
    @contextlib.contextmanager
    def edit(cls, path: Path, *, create: bool = False) -> Iterator[Self]:
        """The users of a file, saved when the block ends well; whoever else edits it waits.

        The lock is on the directory, because the file itself is replaced.
        """
        with _complaints(path):
            directory = os.open(_target(path).parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with _complaints(path):
                fcntl.flock(directory, fcntl.LOCK_EX)
                new = create and not path.exists()
            users = cls(path) if new else cls.load(path)
            yield users
            users.save(path)
        finally:
            os.close(directory)

    def save(self, path: Path) -> None:
        """Replace the file as a whole; only its owner may read it."""
        content = json.dumps(self._content(), indent=2, ensure_ascii=False) + "\n"
        with _complaints(path):
            _replace(_target(path), content.encode())
            self.path, self._seen = path, _Fingerprint.of(os.stat(path))

    def reload_if_changed(self) -> bool:
        """Take what somebody else wrote into the file since; whether there was anything.

        Costs one ``stat`` if there was not. A file that cannot be used is complained about once, not at every call,
        and the users stay as they were: a slip of an editor must not lock everybody out.
        """
        if self.path is None:
            return False
        try:
            found = _Fingerprint.of(os.stat(self.path))
        except OSError:
            found = None
        if found == self._seen:
            return False
        self._seen = found
        self._read(self.path)
        return True

    def add(self, user: User, *, replace: bool = False) -> None:
        if user.name in self._by_name and not replace:
            raise UserError("exists already", user.name)
        self._take({**self._by_name, user.name: user})

    def remove(self, name: str) -> None:
        if name not in self:
            raise UserError("does not exist", name)
        self._take({key: user for key, user in self._by_name.items() if key != prepared_name(name)})

    def get(self, name: str) -> User | None:
        with contextlib.suppress(UserError):
            return self._by_name.get(prepared_name(name))
        return None

    def __contains__(self, name: str) -> bool:
        return self.get(name) is not None

    def __iter__(self) -> Iterator[User]:
        """In the order of their names."""
        return iter(sorted(self._by_name.values(), key=lambda user: user.name))

    def __len__(self) -> int:
        return len(self._by_name)

    def credential(self, name: str, mechanism: str) -> Credential:
        """What to check a password with; for an unknown name a decoy that no password fits."""
        decoy = self._decoy(name, mechanism)  # also for known names: equal work
        user = self.get(name)
        return decoy if user is None else user.credentials[mechanism]

    def verify_plain(self, name: str, password: str) -> User | None:
        """The user if the password is right; an unknown name takes as long as a wrong password."""
        kept = self.credential(name, _PLAIN_CHECK)
        try:
            derived = _scramp().mechanisms[_PLAIN_CHECK].make_auth_info(password, kept.iterations, kept.salt)
        except _scramp().error:
            return None  # the password has characters that no password may have
        return self.get(name) if hmac.compare_digest(Credential(*derived).stored_key, kept.stored_key) else None

    def _decoy(self, name: str, mechanism: str) -> Credential:
        def derived(purpose: str, length: int) -> bytes:
            text = "\0".join((purpose, mechanism, name))
            return hmac.digest(self._decoy_key, text.encode(errors="surrogatepass"), hashlib.sha512)[:length]

        size = _DIGEST_BYTES[mechanism]
        return Credential(derived("salt", 32), derived("stored", size), derived("server", size), self._decoy_iterations)

    def _take(self, by_name: dict[str, User]) -> None:
        """Replace the table as a whole: other threads see the old one or the new one."""
        counts = Counter(credential.iterations for user in by_name.values() for credential in user.credentials.values())
        self._decoy_iterations = counts.most_common(1)[0][0] if counts else ITERATIONS
        self._by_name = by_name

    def _read(self, path: Path) -> None:
        with _complaints(path), path.open("rb") as file:
            found = _Fingerprint.of(os.fstat(file.fileno()))
            data = file.read()
        try:
            decoy_key, by_name = _parsed(data)
        except ValueError as error:
            raise UsersFileError(str(path), str(error)) from None
        self._decoy_key, self._seen = decoy_key, found
        self._take(by_name)

    def _content(self) -> dict[str, object]:
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "decoy_key": _text(self._decoy_key),
            "users": [
                {
                    "name": user.name,
                    "roles": user.roles.names,
                    "credentials": {key: _credential_content(user.credentials[key]) for key in _SCRAM},
                }
                for user in self
            ],
        }


# The file of users

_FORMAT = "upriver users"
_VERSION = 1


class _Fingerprint(NamedTuple):
    """Tells versions of a file apart without reading it."""

    mtime_ns: int
    size: int
    inode: int

    @classmethod
    def of(cls, stat: os.stat_result) -> "_Fingerprint":
        return cls(stat.st_mtime_ns, stat.st_size, stat.st_ino)


@contextlib.contextmanager
def _complaints(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsersFileError(str(path), error.strerror or str(error)) from error


def _target(path: Path) -> Path:
    """Where the file truly is: a link stays a link when it is replaced."""
    return Path(os.path.realpath(path))


def _replace(path: Path, data: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with open(descriptor, "wb") as file:
            with contextlib.suppress(FileNotFoundError, PermissionError):
                # The node that reads the file may run as another user than the administrator who changes it.
                before = path.stat()
                os.fchown(file.fileno(), before.st_uid, before.st_gid)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _parsed(data: bytes) -> tuple[bytes, dict[str, User]]:
    """The decoy key and the users; ``ValueError`` says what is wrong."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError("is not a file of users")
    version = content.get("version")
    if type(version) is not int or version < 1:
        raise ValueError(f"has no valid version: {version!r}")
    if version > _VERSION:
        raise ValueError(f"was written by a later version of Upriver: format {version}, this one reads {_VERSION}")
    entries = content.get("users")
    if not isinstance(entries, list):
        raise ValueError("has no list of users")
    by_name: dict[str, User] = {}
    for number, entry in enumerate(entries, 1):
        user = _user(entry, number)
        if by_name.setdefault(user.name, user) is not user:
            raise ValueError(f"names user {user.name!r} twice")
    return _binary(content.get("decoy_key"), "decoy_key", least=16), by_name


def _user(entry: object, number: int) -> User:
    if not isinstance(entry, dict) or not isinstance(name := entry.get("name"), str):
        raise ValueError(f"user number {number} has no name")
    if prepared_name(name) != name:
        raise ValueError(f"user {name!r} would be spelled {prepared_name(name)!r}")
    roles, credentials = entry.get("roles"), entry.get("credentials")
    if not isinstance(roles, list) or not all(isinstance(role, str) for role in roles):
        raise ValueError(f"user {name!r} has no list of roles")
    if not isinstance(credentials, dict) or set(credentials) != set(_SCRAM):
        raise ValueError(f"user {name!r} needs credentials for {', '.join(_SCRAM)} and nothing else")
    try:
        return User(name, Role.named(roles), {key: _credential(credentials[key], key) for key in _SCRAM})
    except ValueError as error:
        raise ValueError(f"user {name!r}: {error}") from None


def _credential(entry: object, mechanism: str) -> Credential:
    if not isinstance(entry, dict):
        raise ValueError(f"{mechanism} has no credentials")
    iterations = entry.get("iterations")
    if type(iterations) is not int or not ITERATIONS_MIN <= iterations <= ITERATIONS_MAX:
        raise ValueError(f"{mechanism} iterations must be {ITERATIONS_MIN} to {ITERATIONS_MAX}, not {iterations!r}")
    size = _DIGEST_BYTES[mechanism]
    return Credential(
        _binary(entry.get("salt"), f"{mechanism} salt", least=SALT_BYTES_MIN),
        _binary(entry.get("stored_key"), f"{mechanism} stored_key", least=size, most=size),
        _binary(entry.get("server_key"), f"{mechanism} server_key", least=size, most=size),
        iterations,
    )


def _credential_content(credential: Credential) -> dict[str, object]:
    return {key: _text(kept) if isinstance(kept, bytes) else kept for key, kept in credential._asdict().items()}


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _binary(text: object, what: str, *, least: int, most: int = 1024) -> bytes:
    try:
        data = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except ValueError:
        data = b""
    if not least <= len(data) <= most:
        raise ValueError(f"{what} must be {least if least == most else f'at least {least}'} bytes in base64")
    return data


# The exchange


class SaslStatus(enum.Enum):
    """How far a login has come."""

    SUCCESS = "success"
    CONTINUE = "continue"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one message of the client led to."""

    status: SaslStatus
    #: For the client. Empty after a failure: it is told nothing but that.
    challenge: bytes = b""
    user: User | None = None
    #: For the log: who it claimed to be, if it came to that, and what was wrong.
    name: str = ""
    why: str = ""


_WRONG = "wrong name or password"


class SaslExchange:
    """One login of one connection; ``start`` begins it anew at any time."""

    def __init__(self, users: Users, nonce: Callable[[], str] = secrets.token_hex) -> None:
        self._users = users
        self._nonce = nonce
        self._name = ""
        self._expected: Callable[[bytes], Outcome] | None = None

    def start(self, mechanism: bytes, initial: bytes) -> Outcome:
        """The client chose a mechanism, and may have sent its first message with it."""
        self._name, self._expected = "", None
        known = _SPELLINGS.get(bytes(mechanism))
        if known is None:
            # Only what looks like one is repeated: a confused client may have put its password there.
            name = bytes(mechanism).decode("latin-1")
            told = f" {name}" if re.fullmatch(r"[A-Z0-9_-]{1,20}", name) else ""
            return self._failed(f"unknown mechanism{told}")
        self._expected = self._plain if known == "PLAIN" else partial(self._client_first, known)
        # RFC 4422, section 5.1: who sends no initial response is asked for it with an empty challenge.
        return self.step(initial) if initial else Outcome(SaslStatus.CONTINUE)

    def step(self, data: bytes) -> Outcome:
        """The client's next message."""
        expected, self._expected = self._expected, None
        if expected is None:
            return self._failed("no login is under way")
        if len(data) > MESSAGE_BYTES_MAX:
            return self._failed(f"message of {len(data)} bytes")
        try:
            return expected(bytes(data))
        except UnicodeDecodeError:
            return self._failed("message is not UTF-8")

    def _plain(self, data: bytes) -> Outcome:
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
            return self._failed("wants to act for somebody else")
        user = self._users.verify_plain(self._name, password)
        return self._failed(_WRONG) if user is None else self._succeeded(user)

    def _client_first(self, mechanism: str, data: bytes) -> Outcome:
        """RFC 5802, section 5: name and nonce; the answer is our nonce, the salt and the iterations."""
        kept: list[Credential] = []

        def find(name: str) -> Credential:
            self._name = name
            kept.append(self._users.credential(name, mechanism))
            return kept[0]

        try:
            server = _scramp().mechanisms[mechanism].make_server(find, s_nonce=self._nonce())
            server.set_client_first(data.decode())
            challenge = server.get_server_first().encode()
        except _scramp().error as error:
            return self._failed(str(error))
        self._expected = partial(self._client_final, mechanism, server, kept[0])
        return Outcome(SaslStatus.CONTINUE, challenge, name=self._name)

    def _client_final(self, mechanism: str, server: Any, kept: Credential, data: bytes) -> Outcome:
        """RFC 5802, section 5: the proof; the answer proves that we know the user, too."""
        try:
            server.set_client_final(data.decode())
            challenge = server.get_server_final().encode()
        except _scramp().error as error:
            return self._failed(_WRONG if error.server_error is _scramp().invalid_proof else str(error))
        user = self._users.get(self._name)
        if user is None or user.credentials[mechanism] != kept:
            return self._failed("user was changed during the login")
        return self._succeeded(user, challenge)

    def _succeeded(self, user: User, challenge: bytes = b"") -> Outcome:
        return Outcome(SaslStatus.SUCCESS, challenge, user, user.name)

    def _failed(self, why: str) -> Outcome:
        return Outcome(SaslStatus.FAILED, name=self._name, why=why)


# The delay


@dataclass(slots=True)
class _Failures:
    level: float  #: failures not yet forgotten
    last: float  #: when the last one was
    until: float  #: when the next attempt is looked at


class LoginThrottle:
    """How long a peer's next login waits: twice as long after each failure.

    Failures are forgotten one by one, ``forget_s`` after another. A success takes back one of them and the wait, not
    all: who owns an account could otherwise log in between guesses at another one. IPv6 peers count by their /64, the
    least that anybody is given. At most ``peers_max`` are remembered; beyond that the one that failed longest ago goes.
    """

    def __init__(
        self, *, first_s: float = 0.25, longest_s: float = 30.0, forget_s: float = 60.0, peers_max: int = 10_000
    ) -> None:
        self.first_s = first_s
        self.longest_s = longest_s
        self.forget_s = forget_s
        self.peers_max = peers_max
        self._level_max = 1.0
        while first_s * 2 ** (self._level_max - 1) < longest_s:
            self._level_max += 1
        #: The latest failure last.
        self._peers: OrderedDict[str, _Failures] = OrderedDict()

    def delay_s(self, peer: str, now: float) -> float:
        """How long to wait from now before the peer's next login is looked at."""
        failures = self._peers.get(network_of(peer))
        return 0.0 if failures is None else max(0.0, min(failures.until - now, self.longest_s))

    def failed(self, peer: str, now: float) -> None:
        network = network_of(peer)
        level = min(self._level_now(self._peers.pop(network, None), now) + 1, self._level_max)
        wait_s = min(self.first_s * 2 ** (level - 1), self.longest_s)
        self._peers[network] = _Failures(level, now, now + wait_s)
        self._forget(now)

    def succeeded(self, peer: str) -> None:
        network = network_of(peer)
        failures = self._peers.get(network)
        if failures is None:
            return
        failures.level -= 1
        failures.until = failures.last
        if failures.level <= 0:
            del self._peers[network]

    def __len__(self) -> int:
        """How many peers are remembered."""
        return len(self._peers)

    def _level_now(self, failures: _Failures | None, now: float) -> float:
        if failures is None:
            return 0.0
        return max(0.0, failures.level - max(0.0, now - failures.last) / self.forget_s)

    def _forget(self, now: float) -> None:
        while self._peers:
            oldest = next(iter(self._peers))
            if len(self._peers) <= self.peers_max and self._level_now(self._peers[oldest], now) > 0:
                return
            del self._peers[oldest]


def network_of(peer: str) -> str:
    """What counts as one peer: an IPv4 address, or the /64 of an IPv6 one."""
    try:
        address = ipaddress.ip_address(peer.strip("[]"))
    except ValueError:
        return peer
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address), 64), strict=False))
