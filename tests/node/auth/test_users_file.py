"""The users of a node, and the file that holds them."""

import base64
import hashlib
import json
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.sample_users import ALICE, log_in, path, users, users_with
from upriver.errors import StorageError, UserError, UsersFileError
from upriver.node.auth.sasl import SaslStatus
from upriver.node.auth.users import Role, User
from upriver.node.auth.users_file import Users

__all__ = ["path", "users"]


def test_add_remove_and_find(users: Users) -> None:
    bob = User("bob", Role.STREAM, ALICE.credentials)
    users.add(bob)
    assert [user.name for user in users] == ["alice", "bob"]
    assert (len(users), "bob" in users, "carol" in users, "\n" in users) == (2, True, False, False)
    with pytest.raises(UserError, match="user 'bob' already exists"):
        users.add(bob)
    users.add(User("bob", Role.ADMIN, ALICE.credentials), replace=True)
    found = users.get("bob")
    assert found is not None
    assert found.roles is Role.ADMIN
    users.remove("bob")
    assert users.get("bob") is None
    with pytest.raises(UserError, match="user 'bob' does not exist"):
        users.remove("bob")


def test_verify_plain(users: Users) -> None:
    assert users.verify_plain("alice", "wonder land") is ALICE
    assert users.verify_plain("alice", "wonder\u00a0land") is ALICE  # another form of the same password
    for name, password in [("alice", "wonder"), ("alice", ""), ("bob", "wonder land"), ("", ""), ("\n", "x")]:
        assert users.verify_plain(name, password) is None
    assert users.verify_plain("alice", "\0") is None


@pytest.mark.parametrize("name", ["alice", "unknown"])
def test_an_unknown_name_costs_the_work_of_a_wrong_password(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    users = users_with(User.create("alice", "wonder land", Role.READ, iterations=5000))
    derived: list[tuple[str, int, int]] = []
    derive = hashlib.pbkdf2_hmac

    def watched(digest: str, password: bytes, salt: bytes, iterations: int) -> bytes:
        derived.append((digest, len(salt), iterations))
        return derive(digest, password, salt, iterations)

    monkeypatch.setattr(hashlib, "pbkdf2_hmac", watched)
    assert users.verify_plain(name, "guess") is None
    assert derived == [("sha512", 32, 5000)]


def test_save_and_load(users: Users, path: Path) -> None:
    users.add(User("Zoë, the =first", Role.ADMIN, ALICE.credentials))
    users.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert b"wonder" not in path.read_bytes()
    loaded = Users.load(path)
    assert list(loaded) == list(users)
    assert loaded.verify_plain("alice", "wonder land") == ALICE
    assert log_in(loaded, "SCRAM-SHA-512", "Zoë, the =first", "wonder land").status is SaslStatus.SUCCESS


def test_save_replaces_the_file_as_a_whole(users: Users, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    users.save(path)
    before = path.read_bytes()
    users.remove("alice")

    def refuse(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(UsersFileError, match="No space left on device"):
            users.save(path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_save_narrows_the_mode_and_keeps_a_link(users: Users, path: Path, tmp_path: Path) -> None:
    path.write_text("{}")
    path.chmod(0o644)
    link = tmp_path / "link"
    link.symlink_to(path)
    users.save(link)
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(Users.load(path)) == 1


def _changed(change: Callable[[Any], object]) -> bytes:
    """A file of users with something wrong in it."""
    content = json.loads(GOOD)
    change(content)
    return json.dumps(content).encode()


def _user_changed(**fields: object) -> bytes:
    return _changed(lambda content: content["users"][0].update(fields))


def _credential_changed(**fields: object) -> bytes:
    return _changed(lambda content: content["users"][0]["credentials"]["SCRAM-SHA-256"].update(fields))


GOOD = json.dumps(
    {
        "format": "upriver users",
        "version": 1,
        "decoy_key": base64.b64encode(bytes(32)).decode(),
        "users": [
            {
                "name": "alice",
                "roles": ["read"],
                "credentials": {
                    key: {
                        "salt": base64.b64encode(bytes(16)).decode(),
                        "stored_key": base64.b64encode(bytes(size)).decode(),
                        "server_key": base64.b64encode(bytes(size)).decode(),
                        "iterations": 4096,
                    }
                    for key, size in [("SCRAM-SHA-1", 20), ("SCRAM-SHA-256", 32), ("SCRAM-SHA-512", 64)]
                },
            }
        ],
    }
).encode()


def test_the_format_stays_readable(path: Path) -> None:
    path.write_bytes(GOOD)
    assert [(user.name, user.roles) for user in Users.load(path)] == [("alice", Role.READ)]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "is not JSON"),
        (b"alice:secret", "is not JSON"),
        (b"\xff\xfe\xfd", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "is not an Upriver users file"),
        (b"{}", "is not an Upriver users file"),
        (_changed(lambda content: content.pop("version")), "has the invalid version None"),
        (_changed(lambda content: content.update(version=True)), "has the invalid version True"),
        (_changed(lambda content: content.update(version=0)), "has the invalid version 0"),
        (_changed(lambda content: content.update(version=2)), "has format 2, but this version of Upriver reads only 1"),
        (_changed(lambda content: content.pop("users")), "has no list of users"),
        (_changed(lambda content: content.pop("decoy_key")), "decoy_key must be at least 16 bytes in base64"),
        (_changed(lambda content: content.update(users=[7])), "user number 1 has no name"),
        (_changed(lambda content: content["users"].append({})), "user number 2 has no name"),
        (_changed(lambda content: content["users"].append(content["users"][0])), "contains user 'alice' twice"),
        (_user_changed(name=""), "not empty"),
        (_user_changed(name="a\nb"), "control characters"),
        (_user_changed(name="\u2168"), "must be spelled 'IX'"),
        (_user_changed(roles="read"), "user 'alice' has no list of roles"),
        (_user_changed(roles=[1]), "user 'alice' has no list of roles"),
        (_user_changed(roles=["root"]), "user 'alice': unknown role 'root'"),
        (_user_changed(roles=[]), "user 'alice': no role given"),
        (_user_changed(credentials=None), "user 'alice' needs credentials for SCRAM-SHA-1, SCRAM-SHA-256"),
        (_user_changed(credentials={"SCRAM-SHA-1": {}}), "user 'alice' needs credentials for"),
        (
            _changed(lambda content: content["users"][0]["credentials"].update({"SCRAM-SHA-1": 1})),
            "user 'alice': SCRAM-SHA-1 has no credentials",
        ),
        (_credential_changed(iterations=4095), "SCRAM-SHA-256 iterations must be 4096 to 10000000, not 4095"),
        (_credential_changed(iterations=10**8), "SCRAM-SHA-256 iterations must be"),
        (_credential_changed(iterations="4096"), "SCRAM-SHA-256 iterations must be"),
        (_credential_changed(salt="AAAA"), "SCRAM-SHA-256 salt must be at least 12 bytes"),
        (_credential_changed(salt=None), "SCRAM-SHA-256 salt must be"),
        (_credential_changed(stored_key="AAAA"), "SCRAM-SHA-256 stored_key must be 32 bytes in base64"),
        (_credential_changed(server_key="?" * 44), "SCRAM-SHA-256 server_key must be 32 bytes in base64"),
    ],
)
def test_files_that_cannot_be_used(path: Path, data: bytes, why: str) -> None:
    path.write_bytes(data)
    with pytest.raises(UsersFileError) as raised:
        Users.load(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert why in str(raised.value)
    assert isinstance(raised.value, StorageError)


@given(st.binary(max_size=300))
def test_garbage_in_a_file_is_one_kind_of_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "garbage.json"
    path.write_bytes(data)
    with pytest.raises(UsersFileError):
        Users.load(path)


def test_files_that_cannot_be_opened(users: Users, path: Path, tmp_path: Path) -> None:
    with pytest.raises(UsersFileError, match="No such file or directory"):
        Users.load(path)
    with pytest.raises(UsersFileError, match="Is a directory"):
        Users.load(tmp_path)
    with pytest.raises(UsersFileError, match="No such file or directory"):
        users.save(tmp_path / "absent" / "users.json")
    with pytest.raises(UsersFileError, match="No such file or directory"), Users.edit(path / "absent", create=True):
        pytest.fail("there is nothing to edit")


def test_reload_if_changed(users: Users, path: Path) -> None:
    assert users.reload_if_changed() is False  # only in memory
    users.save(path)
    running = Users.load(path)
    assert running.reload_if_changed() is False
    users.add(User("bob", Role.READ, ALICE.credentials))
    users.save(path)
    assert users.reload_if_changed() is False  # its own doing
    assert running.reload_if_changed() is True
    assert running.reload_if_changed() is False
    assert "bob" in running


def test_reload_without_a_change_reads_nothing(users: Users, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    users.save(path)

    def refuse(*_: object) -> None:
        pytest.fail("the file was opened")

    monkeypatch.setattr(Path, "open", refuse)
    assert users.reload_if_changed() is False


def test_a_broken_file_is_reported_once_and_locks_no_user_out(users: Users, path: Path) -> None:
    users.save(path)
    good = path.read_bytes()
    for damage in (lambda: path.write_bytes(good[:100]), path.unlink):
        damage()
        with pytest.raises(UsersFileError):
            users.reload_if_changed()
        assert users.reload_if_changed() is False
        assert users.verify_plain("alice", "wonder land") == ALICE
    path.write_bytes(good)
    assert users.reload_if_changed() is True
    assert "alice" in users


def test_edit(path: Path) -> None:
    with pytest.raises(UsersFileError, match="No such file"), Users.edit(path):
        pytest.fail("there is nothing to edit")
    with Users.edit(path, create=True) as users:
        users.add(ALICE)
    bob = User("bob", Role.READ, ALICE.credentials)
    with pytest.raises(UserError), Users.edit(path) as users:
        any(map(users.add, (bob, ALICE)))
    assert [user.name for user in Users.load(path)] == ["alice"]  # a block that fails changes nothing


def test_a_second_editor_waits(path: Path) -> None:
    entered = threading.Event()

    def add_bob() -> None:
        with Users.edit(path, create=True) as users:
            entered.set()
            users.add(User("bob", Role.READ, ALICE.credentials))

    other = threading.Thread(target=add_bob)
    with Users.edit(path, create=True) as users:
        other.start()
        assert not entered.wait(0.2)
        users.add(ALICE)
    other.join()
    assert [user.name for user in Users.load(path)] == ["alice", "bob"]
