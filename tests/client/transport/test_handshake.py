"""Hello, login and bucket: what is agreed on, and what is said when it cannot be."""

import asyncio
from collections.abc import Callable

import pytest

from upriver.client.kv import KvClient
from upriver.client.transport.address import Address
from upriver.client.transport.handshake import shake_hands
from upriver.client.transport.replies import Reply
from upriver.errors import AuthenticationFailed, KeyNotFound, LoginImpossible, StatusError, UnknownCommand
from upriver.node import EmbeddedNode
from upriver.wire.codes import Status
from upriver.wire.dialects.memcached import Feature, Hello, SaslAuth, SaslListMechanisms, SelectBucket
from upriver.wire.message import Request


async def use(address: str) -> bytes:
    async with KvClient(address) as kv:
        await kv.set("key", "value")
        item = await kv.get("key")
        assert item is not None
        return item.value


def test_login_with_scram(guarded_node: EmbeddedNode) -> None:
    assert asyncio.run(use(f"upriver://me:secret@{guarded_node.address}/default")) == b"value"


@pytest.mark.parametrize(
    ("login", "kind", "said"),
    [
        ("me:wrong@", AuthenticationFailed, "rejects the user 'me' or the password"),
        ("you:secret@", AuthenticationFailed, "rejects the user 'you' or the password"),
        ("me@", LoginImpossible, "the address has no password for user 'me'"),
        ("", AuthenticationFailed, "requires a login: use upriver://user:password@"),
    ],
)
def test_logins_that_are_refused(guarded_node: EmbeddedNode, login: str, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind) as caught:
        asyncio.run(use(f"upriver://{login}{guarded_node.address}/default"))
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)


def test_another_bucket(guarded_node: EmbeddedNode) -> None:
    with pytest.raises(KeyNotFound, match="has no bucket 'other'"):
        asyncio.run(use(f"upriver://me:secret@{guarded_node.address}/other"))


def reply(value: bytes = b"", status: int = 0) -> Reply:
    return Reply(0, status, 0, 0, 0, b"", b"", value)


def features_after(address: str, answers: Callable[[Request], Reply]) -> frozenset[Feature]:
    parsed = Address.parse(address)

    async def ask(request: Request) -> Reply:
        answer = answers(request)
        error = answer.error()
        if error is not None:
            raise error
        return answer

    return asyncio.run(shake_hands(ask, parsed.endpoints[0], parsed, "test"))


def test_a_deployed_server_gets_the_default_bucket() -> None:
    asked: list[Request] = []

    def answer(request: Request) -> Reply:
        asked.append(request)
        return reply(bytes((0, Feature.XERROR))) if isinstance(request, Hello) else reply()

    assert features_after("127.0.0.1:1", answer) == {Feature.XERROR}
    assert [request.name for request in asked if isinstance(request, SelectBucket)] == [b"default"]


def test_a_server_older_than_all_this() -> None:
    assert features_after("127.0.0.1:1", lambda _: reply(status=Status.UNKNOWN_COMMAND)) == frozenset()


def offering(mechanisms: bytes, answer: Reply = reply()) -> Callable[[Request], Reply]:  # noqa: B008
    def answers(request: Request) -> Reply:
        match request:
            case SaslListMechanisms():
                return reply(mechanisms)
            case SaslAuth():
                return answer
        return reply()

    return answers


def test_a_password_is_not_shown_to_the_network() -> None:
    with pytest.raises(LoginImpossible, match="would send the password as plain text"):
        features_after("upriver://me:secret@10.0.0.1:1", offering(b"PLAIN"))
    assert features_after("upriver://me:secret@10.0.0.1:1?tls=on", offering(b"PLAIN")) == frozenset()
    assert features_after("upriver://me:secret@127.0.0.1:1", offering(b"PLAIN")) == frozenset()
    with pytest.raises(LoginImpossible, match="the node offers OTHER"):
        features_after("upriver://me:secret@127.0.0.1:1", offering(b"OTHER"))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (reply(), "without proving that it knows the password"),
        (reply(b"r=x,s=eA==,i=99999999", Status.AUTH_CONTINUE), "99999999 hashing rounds; 4096 to 1000000 are allowed"),
        (reply(b"nonsense", Status.AUTH_CONTINUE), "malformed first message"),
        (reply(b"r=x,s=eA==,i=4096", Status.AUTH_CONTINUE), "did not prove that it knows the password"),
    ],
)
def test_a_server_that_cannot_prove_itself(answer: Reply, said: str) -> None:
    with pytest.raises(LoginImpossible, match=said):
        features_after("upriver://me:secret@127.0.0.1:1", offering(b"SCRAM-SHA256 PLAIN", answer))


def test_other_refusals_are_told_as_they_are() -> None:
    with pytest.raises(StatusError) as caught:
        features_after("127.0.0.1:1", lambda _: reply(b"not now", Status.EBUSY))
    assert not isinstance(caught.value, UnknownCommand)
