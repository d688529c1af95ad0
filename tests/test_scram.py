"""SCRAM on both sides: the vectors of the RFCs, and scramp as an independent implementation."""

import base64
import secrets
from typing import Any

import pytest
import scramp
from hypothesis import given
from hypothesis import strategies as st
from scramp.utils import saslprep as their_saslprep

from upriver.scram import (
    DIGEST_BYTES,
    ITERATIONS_MAX,
    ITERATIONS_MIN,
    SCRAM,
    Credential,
    ScramClient,
    ScramError,
    ScramServer,
    WrongProof,
    saslprep,
)

SCRAM_ERROR: type[Exception] = scramp.ScramException

VECTORS = [
    pytest.param(
        "SCRAM-SHA-1",
        "fyko+d2lbbFgONRv9qkxdawL",
        "3rfcNHYJY1ZVvWVs7j",
        "QSXCR+Q6sek8bf92",
        "v0X8v3Bz2T0CJGbJQyF0X+HI4Ts=",
        "rmF9pqV8S7suAoZWja4dJRkFsKQ=",
        id="RFC 5802, section 5",
    ),
    pytest.param(
        "SCRAM-SHA-256",
        "rOprNGfwEbeRWgbNEkqO",
        "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0",
        "W22ZaJ0SNY7soEsUEjb6gQ==",
        "dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=",
        "6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=",
        id="RFC 7677, section 3",
    ),
    pytest.param(  # no RFC has one; this is the vector that other implementations share
        "SCRAM-SHA-512",
        "rOprNGfwEbeRWgbNEkqO",
        "02431b08-2f89-4bad-a4e6-80c0564ec865",
        "Yin2FuHTt/M0kJWb0t9OI32n2VmOGi3m+JfjOvuDF88=",
        "Hc5yec3NmCD7t+kFRw4/3yD6/F3SQHc7AVYschRja+Bc3sbdjlA0eH1OjJc0DD4ghn1tnXN5/Wr6qm9xmaHt4A==",
        "BQuhnKHqYDwQWS5jAw4sZed+C9KFUALsbrq81bB0mh+bcUUbbMPNNmBIupnS2AmyyDnG5CTBQtkjJ9kyY4kzmw==",
        id="SHA-512",
    ),
]


@pytest.mark.parametrize(("mechanism", "client_nonce", "server_nonce", "salt", "proof", "signature"), VECTORS)
def test_vectors(mechanism: str, client_nonce: str, server_nonce: str, salt: str, proof: str, signature: str) -> None:
    client = ScramClient(mechanism, "user", "pencil", client_nonce)
    assert client.first == f"n,,n=user,r={client_nonce}"
    server = ScramServer(mechanism, client.first, server_nonce)
    assert server.name == "user"
    credential = Credential.create(mechanism, "pencil", 4096, base64.b64decode(salt))
    assert len(credential.stored_key) == len(credential.server_key) == DIGEST_BYTES[mechanism]
    challenge = server.challenge(credential)
    assert challenge == f"r={client_nonce}{server_nonce},s={salt},i=4096"
    final = client.final(challenge)
    assert final == f"c=biws,r={client_nonce}{server_nonce},p={proof}"
    assert server.verify(final) == f"v={signature}"
    client.verify(f"v={signature}")


@pytest.mark.parametrize("mechanism", SCRAM)
@pytest.mark.parametrize(
    ("name", "password"), [("alice", "wonder land"), ("a=b,c", "I\u00adX\u2168"), ("bob", "\u0627")]
)
def test_both_sides_understand_scramp(mechanism: str, name: str, password: str) -> None:
    credential = Credential.create(mechanism, password, ITERATIONS_MIN)
    theirs: Any = scramp.ScramMechanism(mechanism)
    assert tuple(credential) == theirs.make_auth_info(password, ITERATIONS_MIN, credential.salt)

    their_client: Any = scramp.ScramClient([mechanism], name, password)
    server = ScramServer(mechanism, their_client.get_client_first(), secrets.token_hex())
    assert server.name == name
    their_client.set_server_first(server.challenge(credential))
    their_client.set_server_final(server.verify(their_client.get_client_final()))

    client, their_server = ScramClient(mechanism, name, password), theirs.make_server(lambda _: tuple(credential))
    their_server.set_client_first(client.first)
    their_server.set_client_final(client.final(their_server.get_server_first()))
    client.verify(their_server.get_server_final())


def test_a_wrong_password_is_a_wrong_proof() -> None:
    credential = Credential.create("SCRAM-SHA-1", "secret", ITERATIONS_MIN)
    client = ScramClient("SCRAM-SHA-1", "alice", "other")
    server = ScramServer("SCRAM-SHA-1", client.first, "server")
    with pytest.raises(WrongProof):
        server.verify(client.final(server.challenge(credential)))
    with pytest.raises(WrongProof, match="the signature is wrong"):
        client.verify("v=AAAA")


def test_a_signature_before_the_proof_is_wrong() -> None:
    with pytest.raises(WrongProof):
        ScramClient("SCRAM-SHA-1", "alice", "secret").verify("v=AAAA")


@pytest.mark.parametrize(
    ("challenge", "why"),
    [
        ("", "malformed first message"),
        ("r=NONCE1,s=AAAAAAAAAAAAAAAA", "malformed first message"),
        ("r=NONCE1,s=AAAAAAAAAAAAAAAA,i=04096", "malformed first message"),
        ("r=NONCE1,s=AAAAAAAAAAAAAAAA,i=4096,x=1,x=2", "malformed first message"),
        ("e=other-error", "the server reports 'other-error'"),
        ("m=x,r=NONCE1,s=AAAAAAAAAAAAAAAA,i=4096", "the attribute m is not supported"),
        ("r=other,s=AAAAAAAAAAAAAAAA,i=4096", "the nonce does not match"),
        ("r=NONCE,s=AAAAAAAAAAAAAAAA,i=4096", "the nonce does not match"),
        ("r=NONCE\x7f,s=AAAAAAAAAAAAAAAA,i=4096", r"the nonce 'NONCE\\x7f' is not allowed; use printable ASCII"),
        ("r=NONCE1,s=!,i=4096", "the salt is not in base64"),
        ("r=NONCE1,s=AAAA,i=4096", "the salt has 3 bytes; at least 12"),
        ("r=NONCE1,s=AAAAAAAAAAAAAAAA,i=4095", "4095 hashing rounds; 4096 to 5000 are allowed"),
        ("r=NONCE1,s=AAAAAAAAAAAAAAAA,i=5001", "5001 hashing rounds; 4096 to 5000 are allowed"),
    ],
)
def test_challenges_that_a_client_refuses(challenge: str, why: str) -> None:
    with pytest.raises(ScramError, match=why):
        ScramClient("SCRAM-SHA-1", "alice", "secret", "NONCE").final(challenge, 5000)


@pytest.mark.parametrize(
    ("salt", "iterations"), [(b"short", ITERATIONS_MIN), (None, ITERATIONS_MIN - 1), (None, ITERATIONS_MAX + 1)]
)
def test_a_weak_credential_is_refused(salt: bytes | None, iterations: int) -> None:
    with pytest.raises(ScramError):
        Credential.create("SCRAM-SHA-1", "secret", iterations, salt)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a\0b", "control characters are not allowed"),
        ("\udc80", "surrogate codes"),
        ("\u0627a", "both directions"),
        ("\u06271", "must start and end"),
        ("\u0221", "unassigned"),
    ],
)
def test_texts_that_saslprep_refuses(text: str, why: str) -> None:
    with pytest.raises(ScramError, match=why):
        saslprep(text)


@given(st.text(max_size=8) | st.text(alphabet="a1 \u00ad\u00a0\u0627\u05d0\u2168\u200b\u0340\ufb01", max_size=8))
def test_saslprep_agrees_with_scramp(text: str) -> None:
    def theirs() -> str | None:
        try:
            return str(their_saslprep(text))
        except SCRAM_ERROR:
            return None

    def ours() -> str | None:
        try:
            return saslprep(text)
        except ScramError:
            return None

    assert ours() == theirs()


PIECES = [
    "n",
    "y",
    "p=x",
    "",
    "n=alice",
    "n=a=3Db",
    "n=a=b",
    "r=nonce",
    "r=",
    "m=x",
    "x=y",
    "x=z",
    "a=b",
    "c=biws",
    "p=AAAA",
]


@given(st.lists(st.sampled_from(PIECES), max_size=6).map(",".join))
def test_first_messages_are_read_as_scramp_reads_them(message: str) -> None:
    credential = (b"s" * 12, b"k" * 20, b"k" * 20, ITERATIONS_MIN)

    def theirs() -> str | None:
        server: Any = scramp.ScramMechanism("SCRAM-SHA-1").make_server(lambda _: credential, s_nonce="server")
        try:
            server.set_client_first(message)
            return str(server.get_server_first())
        except SCRAM_ERROR:
            return None

    def ours() -> str | None:
        try:
            return ScramServer("SCRAM-SHA-1", message, "server").challenge(Credential(*credential))
        except ScramError:
            return None

    assert ours() == theirs()
