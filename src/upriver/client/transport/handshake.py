"""The handshake of a connection: hello, login, bucket.

An Upriver node grants the feature ``UPRIVER``, and only then does the client use Upriver's own settings. The password
is sent as plain text (PLAIN) only over TLS or on loopback.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from upriver.client.transport.address import BUCKET, Address, Endpoint
from upriver.client.transport.replies import Reply
from upriver.errors import AccessDenied, AuthenticationFailed, KeyNotFound, LoginImpossible, StatusError, UnknownCommand
from upriver.scram import SCRAM, ScramClient, ScramError
from upriver.wire import Request, Status
from upriver.wire.dialects.memcached import Feature, Hello, SaslAuth, SaslListMechanisms, SaslStep, SelectBucket

Ask = Callable[[Request], Awaitable[Reply]]

#: The RFC names of the mechanisms by those on the wire, which omit the dash before the number; the strongest first.
_NAMES: Final = {name.replace("SHA-", "SHA"): name for name in reversed(SCRAM)}
#: The client refuses more rounds of hashing: a hostile server could keep it busy.
ITERATIONS_MAX: Final = 1_000_000
WANTED: Final = (Feature.UPRIVER, Feature.XERROR, Feature.SELECT_BUCKET, Feature.JSON, Feature.SNAPPY)


async def shake_hands(
    ask: Ask, endpoint: Endpoint, address: Address, agent: str, *, tokens: bool = False
) -> frozenset[Feature]:
    """Do the handshake and return the granted features. With ``tokens``, replies to writes carry uuid and seqno."""
    features = await _hello(ask, agent, (*WANTED, Feature.MUTATION_SEQNO) if tokens else WANTED)
    if address.user is not None:
        await _login(ask, endpoint, address)
    await _select(ask, endpoint, address, ours=Feature.UPRIVER in features)
    return features


async def _hello(ask: Ask, agent: str, wanted: tuple[Feature, ...]) -> frozenset[Feature]:
    try:
        reply = await ask(Hello(agent=agent.encode(), features=wanted))
    except UnknownCommand:  # a server without hello
        return frozenset()
    codes = memoryview(reply.value)
    return frozenset(Feature(int.from_bytes(codes[at : at + 2], "big")) for at in range(0, len(codes), 2))


async def _select(ask: Ask, endpoint: Endpoint, address: Address, *, ours: bool) -> None:
    bucket = address.bucket or BUCKET
    try:
        await ask(SelectBucket(name=bucket.encode()))  # from then on refusals carry the cluster map
    except KeyNotFound:
        if ours and not address.bucket:
            return  # an Upriver node has one bucket, of any name
        raise KeyNotFound(f"{endpoint} has no bucket {bucket!r}") from None
    except (AccessDenied, AuthenticationFailed) as error:
        raise login_needed(endpoint, address, error) from None
    except UnknownCommand:  # a server with a single bucket
        return


def login_needed(endpoint: Endpoint, address: Address, error: StatusError) -> StatusError:
    """The error to raise when a node refuses the first request, with advice."""
    if address.user is None:
        return AuthenticationFailed(f"{endpoint} requires a login: use upriver://user:password@{endpoint}")
    return AccessDenied(f"{endpoint} denies this to {address.user!r}: {error.detail or error.text}")


async def _login(ask: Ask, endpoint: Endpoint, address: Address) -> None:
    if address.password is None:
        raise LoginImpossible(
            str(endpoint),
            f"the address has no password for user {address.user!r}; use upriver://user:password@{endpoint}",
        )
    offered = (await ask(SaslListMechanisms())).value.decode(errors="replace").split()
    mechanism = next((wire for wire in _NAMES if wire in offered or _NAMES[wire] in offered), None)
    try:
        if mechanism is not None:
            await _scram(ask, endpoint, address, mechanism if mechanism in offered else _NAMES[mechanism])
        elif "PLAIN" in offered and (address.tls or endpoint.is_loopback):
            value = f"\0{address.user}\0{address.password}".encode()
            await ask(SaslAuth(mechanism=b"PLAIN", value=value))
        else:
            why = f"no usable login method: the node offers {', '.join(offered) or 'none'}"
            if "PLAIN" in offered:
                why += ", which would send the password as plain text; use TLS (?tls=on)"
            raise LoginImpossible(str(endpoint), why)
    except AuthenticationFailed:
        raise AuthenticationFailed(f"{endpoint} rejects the user {address.user!r} or the password") from None


async def _scram(ask: Ask, endpoint: Endpoint, address: Address, mechanism: str) -> None:
    try:
        client = ScramClient(_NAMES.get(mechanism, mechanism), address.user or "", address.password or "")
    except ScramError as error:
        raise LoginImpossible(str(endpoint), f"invalid user or password: {error}") from None
    first = await ask(SaslAuth(mechanism=mechanism.encode(), value=client.first.encode()))
    if first.status != Status.AUTH_CONTINUE:
        raise LoginImpossible(str(endpoint), "the node accepted the login without proving that it knows the password")
    try:
        # Hashing takes milliseconds and would block other connections.
        final = await asyncio.to_thread(client.final, first.value.decode(), ITERATIONS_MAX)
        last = await ask(SaslStep(mechanism=mechanism.encode(), value=final.encode()))
        client.verify(last.value.decode())
    except (ScramError, UnicodeDecodeError) as error:
        raise LoginImpossible(str(endpoint), f"the node did not prove that it knows the password: {error}") from None
