"""The users of a node, in memory and in a file.

The node does not reveal whether a name exists. An unknown name gets a decoy: keys that no password fits, and a salt
that is derived from the name and from a key in the file, so that it stays the same across logins and restarts.
Checking a password for an unknown name then takes the same steps and the same time as for a wrong password.
"""

import base64
import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import secrets
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple, Self

from upriver.errors import UserError, UsersFileError
from upriver.files import storage_errors, write_atomically
from upriver.node.auth.users import ITERATIONS, Role, User, prepared_name
from upriver.scram import (
    DIGEST_BYTES,
    ITERATIONS_MAX,
    ITERATIONS_MIN,
    SALT_BYTES_MIN,
    SCRAM,
    Credential,
    ScramError,
)

#: PLAIN is checked with the strongest hash.
_PLAIN_CHECK: Final = "SCRAM-SHA-512"
_FORMAT: Final = "upriver users"
_VERSION: Final = 1


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
        """Read a file; raise ``UsersFileError`` if it is invalid."""
        if not path.exists():
            why = f"No such file or directory; create it with `upriver user add NAME --roles read,write --users {path}`"
            raise UsersFileError(str(path), why)
        users = cls(path)
        users._read(path)
        return users

    @classmethod
    @contextlib.contextmanager
    def edit(cls, path: Path, *, create: bool = False) -> Iterator[Self]:
        """Yield the users of a file and save them when the block succeeds; other editors wait.

        The lock is on the directory, because the file itself is replaced.
        """
        with storage_errors(path, UsersFileError):
            directory = os.open(_target(path).parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with storage_errors(path, UsersFileError):
                fcntl.flock(directory, fcntl.LOCK_EX)
                new = create and not path.exists()
            users = cls(path) if new else cls.load(path)
            yield users
            users.save(path)
        finally:
            os.close(directory)

    def save(self, path: Path) -> None:
        """Replace the file atomically; only its owner may read it."""
        content = json.dumps(self._content(), indent=2, ensure_ascii=False) + "\n"
        with storage_errors(path, UsersFileError):
            # The node may run as another user than the administrator who changes the file.
            write_atomically(_target(path), content.encode(), mode=0o600, keep_owner=True)
            self.path, self._seen = path, _Fingerprint.of(os.stat(path))

    def reload_if_changed(self) -> bool:
        """Read the file again if it changed, and return whether it did.

        An unchanged file costs one ``stat``. An invalid file is reported once, not at every call, and the users stay
        as they were: a mistake in an editor must not lock everybody out.
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
            raise UserError("already exists", user.name)
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
        """Iterate in the order of names."""
        return iter(sorted(self._by_name.values(), key=lambda user: user.name))

    def __len__(self) -> int:
        return len(self._by_name)

    def credential(self, name: str, mechanism: str) -> Credential:
        """Return the credential of a user, or for an unknown name a decoy that no password fits."""
        decoy = self._decoy(name, mechanism)  # also for known names: equal work
        user = self.get(name)
        return decoy if user is None else user.credentials[mechanism]

    def verify_plain(self, name: str, password: str) -> User | None:
        """Return the user if the password is right; an unknown name takes as long as a wrong password."""
        kept = self.credential(name, _PLAIN_CHECK)
        try:
            derived = Credential.create(_PLAIN_CHECK, password, kept.iterations, kept.salt)
        except ScramError:
            return None  # the password has characters that are not allowed
        return self.get(name) if hmac.compare_digest(derived.stored_key, kept.stored_key) else None

    def _decoy(self, name: str, mechanism: str) -> Credential:
        def derived(purpose: str, length: int) -> bytes:
            text = "\0".join((purpose, mechanism, name))
            return hmac.digest(self._decoy_key, text.encode(errors="surrogatepass"), hashlib.sha512)[:length]

        size = DIGEST_BYTES[mechanism]
        return Credential(derived("salt", 32), derived("stored", size), derived("server", size), self._decoy_iterations)

    def _take(self, by_name: dict[str, User]) -> None:
        """Replace the table at once: other threads see the old one or the new one."""
        counts = Counter(credential.iterations for user in by_name.values() for credential in user.credentials.values())
        self._decoy_iterations = counts.most_common(1)[0][0] if counts else ITERATIONS
        self._by_name = by_name

    def _read(self, path: Path) -> None:
        with storage_errors(path, UsersFileError), path.open("rb") as file:
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
                    "credentials": {key: _credential_content(user.credentials[key]) for key in SCRAM},
                }
                for user in self
            ],
        }


class _Fingerprint(NamedTuple):
    """Tells versions of a file apart without reading it."""

    mtime_ns: int
    size: int
    inode: int

    @classmethod
    def of(cls, stat: os.stat_result) -> "_Fingerprint":
        return cls(stat.st_mtime_ns, stat.st_size, stat.st_ino)


def _target(path: Path) -> Path:
    """The file behind a link, so that a link stays a link when the file is replaced."""
    return Path(os.path.realpath(path))


def _parsed(data: bytes) -> tuple[bytes, dict[str, User]]:
    """Return the decoy key and the users; raise ``ValueError`` if the file is invalid."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError("is not an Upriver users file")
    version = content.get("version")
    if type(version) is not int or version < 1:
        raise ValueError(f"has the invalid version {version!r}")
    if version > _VERSION:
        raise ValueError(f"has format {version}, but this version of Upriver reads only {_VERSION}; upgrade Upriver")
    entries = content.get("users")
    if not isinstance(entries, list):
        raise ValueError("has no list of users")
    by_name: dict[str, User] = {}
    for number, entry in enumerate(entries, 1):
        user = _user(entry, number)
        if by_name.setdefault(user.name, user) is not user:
            raise ValueError(f"contains user {user.name!r} twice")
    return _binary(content.get("decoy_key"), "decoy_key", least=16), by_name


def _user(entry: object, number: int) -> User:
    if not isinstance(entry, dict) or not isinstance(name := entry.get("name"), str):
        raise ValueError(f"user number {number} has no name")
    if prepared_name(name) != name:
        raise ValueError(f"user {name!r} must be spelled {prepared_name(name)!r}")
    roles, credentials = entry.get("roles"), entry.get("credentials")
    if not isinstance(roles, list) or not all(isinstance(role, str) for role in roles):
        raise ValueError(f"user {name!r} has no list of roles")
    if not isinstance(credentials, dict) or set(credentials) != set(SCRAM):
        raise ValueError(f"user {name!r} needs credentials for {', '.join(SCRAM)} and nothing else")
    try:
        return User(name, Role.named(roles), {key: _credential(credentials[key], key) for key in SCRAM})
    except ValueError as error:
        raise ValueError(f"user {name!r}: {error}") from None


def _credential(entry: object, mechanism: str) -> Credential:
    if not isinstance(entry, dict):
        raise ValueError(f"{mechanism} has no credentials")
    iterations = entry.get("iterations")
    if type(iterations) is not int or not ITERATIONS_MIN <= iterations <= ITERATIONS_MAX:
        raise ValueError(f"{mechanism} iterations must be {ITERATIONS_MIN} to {ITERATIONS_MAX}, not {iterations!r}")
    size = DIGEST_BYTES[mechanism]
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
