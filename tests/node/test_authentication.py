"""Users and roles, the file that holds them, SASL, and the delay after failed logins."""

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
from scramp import ScramClient, ScramException, ScramMechanism

from upriver.errors import StorageError, UserError, UsersFileError
from upriver.node.authentication import (
    ITERATIONS_MIN,
    MECHANISMS,
    MESSAGE_BYTES_MAX,
    NAME_BYTES_MAX,
    PASSWORD_BYTES_MAX,
    LoginThrottle,
    Outcome,
    Role,
    SaslExchange,
    SaslStatus,
    User,
    Users,
    prepared_name,
)

SCRAM = {"SCRAM-SHA1": "SCRAM-SHA-1", "SCRAM-SHA256": "SCRAM-SHA-256", "SCRAM-SHA512": "SCRAM-SHA-512"}
ALICE = User.create("alice", "wonder land", Role.READ | Role.WRITE, iterations=ITERATIONS_MIN)


@pytest.fixture
def users() -> Users:
    return users_with(ALICE)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "users.json"


def users_with(*members: User) -> Users:
    users = Users()
    for member in members:
        users.add(member)
    return users


def log_in(users: Users, mechanism: str, name: str, password: str, spelled: str | None = None) -> Outcome:
    """A whole SCRAM exchange with scramp's client, which also checks the server's proof."""
    client = ScramClient([mechanism], name, password)
    exchange = SaslExchange(users)
    first = exchange.start((spelled or mechanism).encode(), client.get_client_first().encode())
    assert (first.status, first.user) == (SaslStatus.CONTINUE, None)
    client.set_server_first(first.challenge.decode())
    final = exchange.step(client.get_client_final().encode())
    if final.status is SaslStatus.SUCCESS:
        client.set_server_final(final.challenge.decode())
    return final


def assert_failed(outcome: Outcome, why: str = "") -> None:
    assert outcome.status is SaslStatus.FAILED
    assert outcome.user is None
    assert outcome.challenge == b""
    assert why in outcome.why
    assert outcome.why


# Roles and users


def test_roles() -> None:
    assert all(role in Role.ADMIN for role in (Role.READ, Role.WRITE, Role.STREAM, Role.ADMIN))
    assert Role.ADMIN not in Role.READ | Role.WRITE | Role.STREAM
    assert Role.WRITE not in Role.READ | Role.STREAM
    assert Role.named(["stream", "read"]) == Role.READ | Role.STREAM
    assert Role.named(["stream", "read"]).names == ["read", "stream"]
    assert Role.named(["read", "admin"]).names == ["admin"]


@pytest.mark.parametrize("names", [["root"], ["read", "Write"], [""], []])
def test_unknown_roles(names: list[str]) -> None:
    with pytest.raises(UserError, match="choose from read, write, stream, admin"):
        Role.named(names)


def test_a_user_keeps_no_password_and_prints_no_keys() -> None:
    assert repr(ALICE) == "User(name='alice', roles=<Role.READ|WRITE: 3>)"
    kept = ALICE.credentials.values()
    assert len({credential.salt for credential in kept}) == 3
    assert not any(b"wonder" in part for c in kept for part in (c.salt, c.stored_key, c.server_key))


@pytest.mark.parametrize(
    ("name", "password", "why"),
    [
        ("", "secret", "not empty"),
        ("\u00ad", "secret", "not empty"),
        ("bob\n", "secret", "control characters"),
        ("n" * (NAME_BYTES_MAX + 1), "secret", "more than 128 bytes"),
        ("bob", "", "password that is not empty"),
        ("bob", "se\0cret", "cannot have this password: control characters"),
        ("bob", "\udc80", "cannot have this password: surrogate"),
        ("bob", "p" * (PASSWORD_BYTES_MAX + 1), "more than 1024 bytes"),
    ],
)
def test_users_that_cannot_be(name: str, password: str, why: str) -> None:
    with pytest.raises(UserError, match=why) as raised:
        User.create(name, password, Role.READ)
    assert "secret" not in str(raised.value)


def test_add_remove_and_find(users: Users) -> None:
    bob = User("bob", Role.STREAM, ALICE.credentials)
    users.add(bob)
    assert [user.name for user in users] == ["alice", "bob"]
    assert (len(users), "bob" in users, "carol" in users, "\n" in users) == (2, True, False, False)
    with pytest.raises(UserError, match="user 'bob' exists already"):
        users.add(bob)
    users.add(User("bob", Role.ADMIN, ALICE.credentials), replace=True)
    found = users.get("bob")
    assert found is not None
    assert found.roles is Role.ADMIN
    users.remove("bob")
    assert users.get("bob") is None
    with pytest.raises(UserError, match="user 'bob' does not exist"):
        users.remove("bob")


def test_a_name_has_one_form() -> None:
    """RFC 4013, section 3: compatibility forms and soft hyphens are mapped away."""
    assert prepared_name("I\u00adX") == prepared_name("\u2168") == "IX"
    users = users_with(User("IX", Role.READ, ALICE.credentials))
    assert "\u2168" in users
    users.remove("I\u00adX")
    assert len(users) == 0


# PLAIN


def test_verify_plain(users: Users) -> None:
    assert users.verify_plain("alice", "wonder land") is ALICE
    assert users.verify_plain("alice", "wonder\u00a0land") is ALICE  # another form of the same password
    for name, password in [("alice", "wonder"), ("alice", ""), ("bob", "wonder land"), ("", ""), ("\n", "x")]:
        assert users.verify_plain(name, password) is None
    assert users.verify_plain("alice", "\0") is None


@pytest.mark.parametrize("name", ["alice", "nobody"])
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


@pytest.mark.parametrize("message", [b"\0alice\0wonder land", b"alice\0alice\0wonder land"])
def test_plain(users: Users, message: bytes) -> None:
    outcome = SaslExchange(users).start(b"PLAIN", message)
    assert outcome == Outcome(SaslStatus.SUCCESS, b"", ALICE, "alice")


def test_plain_in_two_steps(users: Users) -> None:
    exchange = SaslExchange(users)
    assert exchange.start(b"PLAIN", b"") == Outcome(SaslStatus.CONTINUE)
    assert exchange.step(b"\0alice\0wonder land").user is ALICE


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (b"\0alice\0wonder", "wrong name or password"),
        (b"\0alice\0", "wrong name or password"),
        (b"\0bob\0wonder land", "wrong name or password"),
        (b"bob\0alice\0wonder land", "act for somebody else"),
        (b"alice\0wonder land", "malformed"),
        (b"\0alice\0wonder land\0", "malformed"),
        (b"alice", "malformed"),
        (b"\0\0wonder land", "not empty"),
        (b"\0al\nice\0wonder land", "control characters"),
        (b"\0alice\0\xff", "not UTF-8"),
        (b"\0alice\0" + b"p" * MESSAGE_BYTES_MAX, "bytes"),
    ],
)
def test_plain_refused(users: Users, message: bytes, why: str) -> None:
    assert_failed(SaslExchange(users).start(b"PLAIN", message), why)


# SCRAM


def test_mechanisms_are_all_known(users: Users) -> None:
    for mechanism in MECHANISMS.split():
        assert SaslExchange(users).start(mechanism.encode(), b"").status is SaslStatus.CONTINUE


@pytest.mark.parametrize(("spelled", "mechanism"), [*SCRAM.items(), *((rfc, rfc) for rfc in SCRAM.values())])
def test_scram(users: Users, spelled: str, mechanism: str) -> None:
    outcome = log_in(users, mechanism, "alice", "wonder land", spelled)
    assert outcome.status is SaslStatus.SUCCESS
    assert outcome.user is ALICE
    assert outcome.challenge.startswith(b"v=")
    assert_failed(log_in(users, mechanism, "alice", "wonder", spelled), "wrong name or password")
    assert_failed(log_in(users, mechanism, "bob", "wonder land", spelled), "wrong name or password")


@pytest.mark.parametrize(
    ("mechanism", "client_nonce", "server_nonce", "salt", "proof", "verifier"),
    [
        pytest.param(
            b"SCRAM-SHA1",
            "fyko+d2lbbFgONRv9qkxdawL",
            "3rfcNHYJY1ZVvWVs7j",
            "QSXCR+Q6sek8bf92",
            "v0X8v3Bz2T0CJGbJQyF0X+HI4Ts=",
            "rmF9pqV8S7suAoZWja4dJRkFsKQ=",
            id="RFC 5802, section 5",
        ),
        pytest.param(
            b"SCRAM-SHA256",
            "rOprNGfwEbeRWgbNEkqO",
            "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0",
            "W22ZaJ0SNY7soEsUEjb6gQ==",
            "dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=",
            "6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=",
            id="RFC 7677, section 3",
        ),
        pytest.param(  # no RFC has one; this is the vector that other implementations share
            b"SCRAM-SHA512",
            "rOprNGfwEbeRWgbNEkqO",
            "02431b08-2f89-4bad-a4e6-80c0564ec865",
            "Yin2FuHTt/M0kJWb0t9OI32n2VmOGi3m+JfjOvuDF88=",
            "Hc5yec3NmCD7t+kFRw4/3yD6/F3SQHc7AVYschRja+Bc3sbdjlA0eH1OjJc0DD4ghn1tnXN5/Wr6qm9xmaHt4A==",
            "BQuhnKHqYDwQWS5jAw4sZed+C9KFUALsbrq81bB0mh+bcUUbbMPNNmBIupnS2AmyyDnG5CTBQtkjJ9kyY4kzmw==",
            id="SHA-512",
        ),
    ],
)
def test_scram_vectors(
    mechanism: bytes, client_nonce: str, server_nonce: str, salt: str, proof: str, verifier: str
) -> None:
    user = User.create("user", "pencil", Role.READ, iterations=4096, salt=base64.b64decode(salt))
    exchange = SaslExchange(users_with(user), nonce=lambda: server_nonce)
    first = exchange.start(mechanism, f"n,,n=user,r={client_nonce}".encode())
    assert first.challenge.decode() == f"r={client_nonce}{server_nonce},s={salt},i=4096"
    final = exchange.step(f"c=biws,r={client_nonce}{server_nonce},p={proof}".encode())
    assert final == Outcome(SaslStatus.SUCCESS, f"v={verifier}".encode(), user, "user")


def test_the_nonce_of_couchbase_sdks() -> None:
    """Recorded from the Python SDK 4.6.3: its nonce has spaces, which RFC 5802 does not allow."""
    salt = "W7oFic7MYKoqXgb9oUuY4Gp/DFXLKwkq57oLD7FfaOI="
    client_nonce = "0x34 0xffffff82 0xffffff86 0x18 0xffffff97 0xffffffd2 0xffffffbb 0xfffffff1"
    server_nonce = "c62336a1f9ddc91a6ff713c05607976aab85680c143d30851d8f8e68c2012692"
    user = User.create("alice", "secret pw", Role.READ, iterations=15_000, salt=base64.b64decode(salt))
    exchange = SaslExchange(users_with(user), nonce=lambda: server_nonce)
    first = exchange.start(b"SCRAM-SHA1", f"n,,n=alice,r={client_nonce}".encode())
    assert first.challenge.decode() == f"r={client_nonce}{server_nonce},s={salt},i=15000"
    final = exchange.step(f"c=biws,r={client_nonce}{server_nonce},p=AoxJbHZ965RkUTu2TY2SILtBIDE=".encode())
    assert final == Outcome(SaslStatus.SUCCESS, b"v=J7c54sTAv7hWn33cFm3IYfycxIE=", user, "alice")


def test_other_users_of_scramp_keep_its_rules() -> None:
    server = ScramMechanism("SCRAM-SHA-1").make_server(lambda name: ALICE.credentials["SCRAM-SHA-1"])
    with pytest.raises(ScramException, match="Nonce contains invalid characters"):
        server.set_client_first("n,,n=alice,r=no nce")


def test_scram_first_message_in_a_step(users: Users) -> None:
    exchange = SaslExchange(users)
    client = ScramClient(["SCRAM-SHA-256"], "alice", "wonder land")
    assert exchange.start(b"SCRAM-SHA256", b"") == Outcome(SaslStatus.CONTINUE)
    client.set_server_first(exchange.step(client.get_client_first().encode()).challenge.decode())
    assert exchange.step(client.get_client_final().encode()).user is ALICE


@pytest.mark.parametrize("mechanism", SCRAM.values())
def test_an_unknown_name_looks_like_a_known_one(users: Users, path: Path, mechanism: str) -> None:
    def salt_and_iterations(users: Users, name: str) -> tuple[bytes, bytes]:
        first = SaslExchange(users).start(mechanism.encode(), f"n,,n={name},r=nonce".encode())
        assert first.status is SaslStatus.CONTINUE
        _, salt, iterations = first.challenge.split(b",")
        return salt, iterations

    users.save(path)
    known, unknown = salt_and_iterations(users, "alice"), salt_and_iterations(users, "bob")
    assert len(known[0]) == len(unknown[0])
    assert known[1] == unknown[1]
    assert unknown != salt_and_iterations(users, "carol")
    assert unknown == salt_and_iterations(users, "bob")
    assert unknown == salt_and_iterations(Users.load(path), "bob")  # after a restart, too


@pytest.mark.parametrize(
    ("first", "why"),
    [
        (b"n,,n=alice", "Malformed"),
        (b"n,,r=nonce,n=alice", "Malformed"),
        (b"n,,n=,r=nonce", "Malformed"),
        (b"n,,n=al=ice,r=nonce", "=3D|'='"),
        (b"n,,n=alice,r=no\x7fnce", "Nonce"),
        (b"n,,n=alice,r=no\tnce", "Nonce"),
        (b"n,,m=x,n=alice,r=nonce", "'m' attribute"),
        (b"n,a=bob,n=alice,r=nonce", "authzid"),
        (b"p=tls-unique,,n=alice,r=nonce", "channel binding"),
        (b"x,,n=alice,r=nonce", "GS2"),
        (b"alice", "malformed"),
        (b"n,,n=\xff,r=nonce", "not UTF-8"),
        (b"n,,n=alice,r=" + b"n" * MESSAGE_BYTES_MAX, "bytes"),
    ],
)
def test_scram_first_message_refused(users: Users, first: bytes, why: str) -> None:
    exchange = SaslExchange(users)
    outcome = exchange.start(b"SCRAM-SHA512", first)
    assert outcome.status is SaslStatus.FAILED
    assert any(each in outcome.why for each in why.split("|"))
    assert_failed(exchange.step(b"c=biws,r=nonce,p=AAAA"), "no login is under way")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (lambda final: final.replace(b"c=biws", b"c=eSws"), "channel bindings"),
        (lambda final: final.replace(b"c=biws", b"c=!"), "encoded"),
        (lambda final: final.replace(b",r=", b",r=x"), "nonce"),
        (lambda final: final.split(b",p=")[0], "Malformed"),
        (lambda final: final.split(b",p=")[0] + b",p=!", "base 64"),
        (lambda final: final.split(b",p=")[0] + b",p=AAAA", "wrong name or password"),
        (lambda final: final.replace(b",p=", b",x=y,p="), "wrong name or password"),
        (lambda final: final + b"\xff", "not UTF-8"),
        (lambda final: b"", "Malformed"),
    ],
)
def test_scram_final_message_refused(users: Users, changed: Callable[[bytes], bytes], why: str) -> None:
    client, exchange = ScramClient(["SCRAM-SHA-1"], "alice", "wonder land"), SaslExchange(users)
    first = exchange.start(b"SCRAM-SHA1", client.get_client_first().encode())
    client.set_server_first(first.challenge.decode())
    final = client.get_client_final().encode()
    outcome = exchange.step(changed(final))
    assert_failed(outcome, why)
    assert outcome.name == "alice"
    assert_failed(exchange.step(final), "no login is under way")  # no second guess in one exchange


def changed_password(users: Users) -> None:
    users.add(User.create("alice", "other", Role.READ, iterations=ITERATIONS_MIN), replace=True)


@pytest.mark.parametrize("change", [changed_password, lambda users: users.remove("alice")])
def test_a_user_who_changes_during_the_exchange_is_refused(users: Users, change: Callable[[Users], None]) -> None:
    client, exchange = ScramClient(["SCRAM-SHA-1"], "alice", "wonder land"), SaslExchange(users)
    client.set_server_first(exchange.start(b"SCRAM-SHA1", client.get_client_first().encode()).challenge.decode())
    change(users)
    assert_failed(exchange.step(client.get_client_final().encode()), "changed during the login")


def test_roles_given_during_the_exchange_count(users: Users) -> None:
    client, exchange = ScramClient(["SCRAM-SHA-1"], "alice", "wonder land"), SaslExchange(users)
    client.set_server_first(exchange.start(b"SCRAM-SHA1", client.get_client_first().encode()).challenge.decode())
    users.add(User("alice", Role.STREAM, ALICE.credentials), replace=True)
    user = exchange.step(client.get_client_final().encode()).user
    assert user is not None
    assert user.roles is Role.STREAM


def test_a_proof_cannot_be_replayed(users: Users) -> None:
    client, exchange = ScramClient(["SCRAM-SHA-256"], "alice", "wonder land"), SaslExchange(users)
    first = client.get_client_first().encode()
    client.set_server_first(exchange.start(b"SCRAM-SHA256", first).challenge.decode())
    final = client.get_client_final().encode()
    assert exchange.step(final).status is SaslStatus.SUCCESS
    assert_failed(exchange.step(final), "no login is under way")
    assert exchange.start(b"SCRAM-SHA256", first).status is SaslStatus.CONTINUE
    assert_failed(exchange.step(final), "nonce")


def test_a_password_in_the_place_of_the_mechanism_is_not_repeated(users: Users) -> None:
    outcome = SaslExchange(users).start(b"PLAIN\0alice\0hunter2", b"")
    assert_failed(outcome, "unknown mechanism")
    assert "hunter2" not in str(outcome)


def test_without_users_nobody_logs_in() -> None:
    assert_failed(log_in(Users(), "SCRAM-SHA-512", "alice", "wonder land"), "wrong name or password")
    assert_failed(SaslExchange(Users()).start(b"PLAIN", b"\0alice\0wonder land"), "wrong name or password")


@pytest.mark.parametrize("mechanism", [b"", b"CRAM-MD5", b"plain", b"SCRAM-SHA-256-PLUS", b"\xff" * 300])
def test_unknown_mechanism(users: Users, mechanism: bytes) -> None:
    exchange = SaslExchange(users)
    assert_failed(exchange.start(mechanism, b"\0alice\0wonder land"), "unknown mechanism")
    assert_failed(exchange.step(b"\0alice\0wonder land"), "no login is under way")


def test_step_before_start(users: Users) -> None:
    assert_failed(SaslExchange(users).step(b"\0alice\0wonder land"), "no login is under way")


def test_start_begins_anew(users: Users) -> None:
    exchange = SaslExchange(users)
    exchange.start(b"SCRAM-SHA1", b"n,,n=alice,r=nonce")
    outcome = exchange.start(b"SCRAM-SHA1", b"nonsense")
    assert_failed(outcome)
    assert outcome.name == ""
    assert exchange.start(b"PLAIN", b"\0alice\0wonder land").user is ALICE


GARBAGE = st.one_of(
    st.binary(max_size=200),
    st.text(alphabet="nrcpvsimaey=,\0 AZ/+\u00ad\u0627b", max_size=60).map(str.encode),
    st.builds(lambda name, nonce: f"n,,n={name},r={nonce}".encode(), st.text(max_size=20), st.text(max_size=20)),
    st.builds(lambda name, password: f"\0{name}\0{password}".encode(), st.text(max_size=9), st.text(max_size=9)),
    st.builds(lambda proof: b"c=biws,r=noncenonce,p=" + base64.b64encode(proof), st.binary(max_size=70)),
)
SHARED = users_with(ALICE)


@given(
    mechanism=st.sampled_from([*(name.encode() for name in MECHANISMS.split()), b"NONE"]),
    initial=st.one_of(GARBAGE, st.just(b"n,,n=alice,r=nonce")),
    steps=st.lists(GARBAGE, max_size=3),
)
def test_garbage_never_raises_and_never_logs_in(mechanism: bytes, initial: bytes, steps: list[bytes]) -> None:
    exchange = SaslExchange(SHARED, nonce=lambda: "nonce")
    outcomes = [exchange.start(mechanism, initial), *map(exchange.step, steps)]
    for outcome in outcomes:
        assert outcome.user is None
        assert outcome.status in (SaslStatus.CONTINUE, SaslStatus.FAILED)
        assert outcome.name.isprintable()
        assert outcome.why.isprintable()
        if outcome.status is SaslStatus.FAILED:
            assert_failed(outcome)


# The file


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
        (b"[]", "is not a file of users"),
        (b"{}", "is not a file of users"),
        (_changed(lambda content: content.pop("version")), "has no valid version: None"),
        (_changed(lambda content: content.update(version=True)), "has no valid version: True"),
        (_changed(lambda content: content.update(version=0)), "has no valid version: 0"),
        (_changed(lambda content: content.update(version=2)), "later version of Upriver: format 2, this one reads 1"),
        (_changed(lambda content: content.pop("users")), "has no list of users"),
        (_changed(lambda content: content.pop("decoy_key")), "decoy_key must be at least 16 bytes in base64"),
        (_changed(lambda content: content.update(users=[7])), "user number 1 has no name"),
        (_changed(lambda content: content["users"].append({})), "user number 2 has no name"),
        (_changed(lambda content: content["users"].append(content["users"][0])), "names user 'alice' twice"),
        (_user_changed(name=""), "not empty"),
        (_user_changed(name="a\nb"), "control characters"),
        (_user_changed(name="\u2168"), "would be spelled 'IX'"),
        (_user_changed(roles="read"), "user 'alice' has no list of roles"),
        (_user_changed(roles=[1]), "user 'alice' has no list of roles"),
        (_user_changed(roles=["root"]), "user 'alice': there is no role 'root'"),
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


def test_a_broken_file_is_complained_about_once_and_locks_nobody_out(users: Users, path: Path) -> None:
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


def test_who_edits_at_the_same_time_waits(path: Path) -> None:
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


# The delay


def test_the_delay_doubles_up_to_a_limit() -> None:
    throttle = LoginThrottle(first_s=1, longest_s=10, forget_s=1e9)
    delays = []
    for _ in range(6):
        throttle.failed("192.0.2.1", 100.0)
        delays.append(throttle.delay_s("192.0.2.1", 100.0))
    assert delays == pytest.approx([1, 2, 4, 8, 10, 10])
    assert throttle.delay_s("192.0.2.2", 100.0) == 0
    assert throttle.delay_s("192.0.2.1", 104.0) == pytest.approx(6)
    assert throttle.delay_s("192.0.2.1", 110.0) == 0
    assert throttle.delay_s("192.0.2.1", 0.0) <= 10  # even if the clock goes back


def test_failures_are_forgotten_one_by_one() -> None:
    throttle = LoginThrottle(first_s=1, longest_s=8, forget_s=60)
    for _ in range(100):
        throttle.failed("192.0.2.1", 0.0)  # counts only as far as the delay grows
    throttle.failed("192.0.2.1", 120.0)
    assert throttle.delay_s("192.0.2.1", 120.0) == pytest.approx(4)
    throttle.failed("192.0.2.1", 1000.0)
    assert throttle.delay_s("192.0.2.1", 1000.0) == pytest.approx(1)
    throttle.failed("192.0.2.1", 0.0)  # a clock that went back counts as no time
    assert throttle.delay_s("192.0.2.1", 0.0) == pytest.approx(2)


def test_a_success_ends_the_wait_but_takes_back_one_failure_only() -> None:
    throttle = LoginThrottle(first_s=1, longest_s=100, forget_s=1e9)
    throttle.succeeded("192.0.2.1")
    throttle.failed("192.0.2.1", 0.0)
    throttle.succeeded("192.0.2.1")
    assert len(throttle) == 0
    for _ in range(3):
        throttle.failed("192.0.2.1", 0.0)
    throttle.succeeded("192.0.2.1")
    assert throttle.delay_s("192.0.2.1", 0.0) == 0
    throttle.failed("192.0.2.1", 0.0)
    assert throttle.delay_s("192.0.2.1", 0.0) == pytest.approx(4)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2001:db8::1", "2001:db8::ffff:0:0:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("fe80::1%eth0", "fe80::2", True),
        ("192.0.2.1", "192.0.2.2", False),
        ("[2001:db8::1]", "2001:db8::2", True),
        ("unix", "unix", True),
        ("unix", "", False),
    ],
)
def test_who_counts_as_the_same_peer(one: str, other: str, same: bool) -> None:
    throttle = LoginThrottle()
    throttle.failed(one, 0.0)
    assert (throttle.delay_s(other, 0.0) > 0) is same


def test_the_throttle_is_bounded_and_empties_itself() -> None:
    throttle = LoginThrottle(peers_max=100)
    throttle.failed("10.1.0.0", 0.0)
    for number in range(1000):
        throttle.failed(f"10.0.{number // 256}.{number % 256}", 1.0)
        throttle.failed("10.2.0.0", 1.0)
        assert len(throttle) <= 100
    assert throttle.delay_s("10.1.0.0", 0.0) == 0  # the oldest had to go
    assert throttle.delay_s("10.2.0.0", 1.0) > 0  # who keeps failing stays
    throttle.failed("10.3.0.0", 1e6)
    assert len(throttle) == 1


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.booleans(), st.floats(0, 100)), max_size=50))
def test_delays_stay_within_their_limits(attempts: list[tuple[str, bool, float]]) -> None:
    throttle = LoginThrottle()
    now = 0.0
    for peer, right, passed in attempts:
        now += passed
        if right:
            throttle.succeeded(peer)
            assert throttle.delay_s(peer, now) == 0
        else:
            throttle.failed(peer, now)
            assert throttle.first_s <= round(throttle.delay_s(peer, now), 6) <= throttle.longest_s
