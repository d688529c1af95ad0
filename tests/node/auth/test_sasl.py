"""Logins by PLAIN and SCRAM, message by message."""

import base64
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scramp import ScramClient

from tests.support.sample_users import ALICE, log_in, path, users, users_with
from upriver.node.auth.sasl import MECHANISMS, MESSAGE_BYTES_MAX, LoginOutcome, SaslExchange, SaslStatus
from upriver.node.auth.users import Role, User
from upriver.node.auth.users_file import Users
from upriver.scram import ITERATIONS_MIN

__all__ = ["path", "users"]

SPELLED = {"SCRAM-SHA1": "SCRAM-SHA-1", "SCRAM-SHA256": "SCRAM-SHA-256", "SCRAM-SHA512": "SCRAM-SHA-512"}


def assert_failed(outcome: LoginOutcome, why: str = "") -> None:
    assert outcome.status is SaslStatus.FAILED
    assert outcome.user is None
    assert outcome.challenge == b""
    assert why in outcome.why
    assert outcome.why


@pytest.mark.parametrize("message", [b"\0alice\0wonder land", b"alice\0alice\0wonder land"])
def test_plain(users: Users, message: bytes) -> None:
    outcome = SaslExchange(users).start(b"PLAIN", message)
    assert outcome == LoginOutcome(SaslStatus.SUCCESS, b"", ALICE, "alice")


def test_plain_in_two_steps(users: Users) -> None:
    exchange = SaslExchange(users)
    assert exchange.start(b"PLAIN", b"") == LoginOutcome(SaslStatus.CONTINUE)
    assert exchange.step(b"\0alice\0wonder land").user is ALICE


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (b"\0alice\0wonder", "wrong name or password"),
        (b"\0alice\0", "wrong name or password"),
        (b"\0bob\0wonder land", "wrong name or password"),
        (b"bob\0alice\0wonder land", "acting for another user"),
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


def test_mechanisms_are_all_known(users: Users) -> None:
    for mechanism in MECHANISMS.split():
        assert SaslExchange(users).start(mechanism.encode(), b"").status is SaslStatus.CONTINUE


@pytest.mark.parametrize(("spelled", "mechanism"), [*SPELLED.items(), *((rfc, rfc) for rfc in SPELLED.values())])
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
    assert final == LoginOutcome(SaslStatus.SUCCESS, f"v={verifier}".encode(), user, "user")


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
    assert final == LoginOutcome(SaslStatus.SUCCESS, b"v=J7c54sTAv7hWn33cFm3IYfycxIE=", user, "alice")


def test_scram_first_message_in_a_step(users: Users) -> None:
    exchange = SaslExchange(users)
    client = ScramClient(["SCRAM-SHA-256"], "alice", "wonder land")
    assert exchange.start(b"SCRAM-SHA256", b"") == LoginOutcome(SaslStatus.CONTINUE)
    client.set_server_first(exchange.step(client.get_client_first().encode()).challenge.decode())
    assert exchange.step(client.get_client_final().encode()).user is ALICE


@pytest.mark.parametrize("mechanism", SPELLED.values())
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
        (b"n,,n=alice", "malformed"),
        (b"n,,r=nonce,n=alice", "malformed"),
        (b"n,,n=,r=nonce", "malformed"),
        (b"n,,n=al=ice,r=nonce", "=3D"),
        (b"n,,n=alice,r=no\x7fnce", "nonce"),
        (b"n,,n=alice,r=no\tnce", "nonce"),
        (b"n,,m=x,n=alice,r=nonce", "attribute m"),
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
    assert_failed(outcome, why)
    assert_failed(exchange.step(b"c=biws,r=nonce,p=AAAA"), "no login is in progress")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (lambda final: final.replace(b"c=biws", b"c=eSws"), "channel bindings"),
        (lambda final: final.replace(b"c=biws", b"c=!"), "base64"),
        (lambda final: final.replace(b",r=", b",r=x"), "nonce"),
        (lambda final: final.split(b",p=")[0], "malformed"),
        (lambda final: final.split(b",p=")[0] + b",p=!", "base64"),
        (lambda final: final.split(b",p=")[0] + b",p=AAAA", "wrong name or password"),
        (lambda final: final.replace(b",p=", b",x=y,p="), "wrong name or password"),
        (lambda final: final + b"\xff", "not UTF-8"),
        (lambda final: b"", "malformed"),
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
    assert_failed(exchange.step(final), "no login is in progress")  # no second guess in one exchange


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
    assert_failed(exchange.step(final), "no login is in progress")
    assert exchange.start(b"SCRAM-SHA256", first).status is SaslStatus.CONTINUE
    assert_failed(exchange.step(final), "nonce")


def test_a_password_in_the_place_of_the_mechanism_is_not_repeated(users: Users) -> None:
    outcome = SaslExchange(users).start(b"PLAIN\0alice\0hunter2", b"")
    assert_failed(outcome, "unknown mechanism")
    assert "hunter2" not in str(outcome)


def test_without_users_no_login_succeeds() -> None:
    assert_failed(log_in(Users(), "SCRAM-SHA-512", "alice", "wonder land"), "wrong name or password")
    assert_failed(SaslExchange(Users()).start(b"PLAIN", b"\0alice\0wonder land"), "wrong name or password")


@pytest.mark.parametrize("mechanism", [b"", b"CRAM-MD5", b"plain", b"SCRAM-SHA-256-PLUS", b"\xff" * 300])
def test_unknown_mechanism(users: Users, mechanism: bytes) -> None:
    exchange = SaslExchange(users)
    assert_failed(exchange.start(mechanism, b"\0alice\0wonder land"), "unknown mechanism")
    assert_failed(exchange.step(b"\0alice\0wonder land"), "no login is in progress")


def test_step_before_start(users: Users) -> None:
    assert_failed(SaslExchange(users).step(b"\0alice\0wonder land"), "no login is in progress")


def test_start_begins_again(users: Users) -> None:
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
