"""What a connection says first: hello, login, bucket.

A node of ours says so by granting the feature ``UPRIVER``; only then are our own settings used. Everybody else is a
deployed server and gets what those expect. Passwords never cross an open network: PLAIN is used over TLS, or where the
connection stays on this machine.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any, Final

from upriver.client.transport.address import BUCKET, Address, Endpoint
from upriver.client.transport.replies import Reply
from upriver.errors import AccessDenied, AuthenticationFailed, KeyNotFound, LoginImpossible, StatusError, UnknownCommand
from upriver.wire import Request, Status
from upriver.wire.dialects.memcached import Feature, Hello, SaslAuth, SaslListMechanisms, SaslStep, SelectBucket

Ask = Callable[[Request], Awaitable[Reply]]

#: The strongest first.
SCRAM: Final = ("SCRAM-SHA-512", "SCRAM-SHA-256", "SCRAM-SHA-1")
#: On the wire the dash before the number is left out.
_NAMES: Final = {name.replace("SHA-", "SHA"): name for name in SCRAM}
#: A server that wants more rounds of hashing than this wants to keep us busy.
ITERATIONS_MAX: Final = 1_000_000
WANTED: Final = (Feature.UPRIVER, Feature.XERROR, Feature.SELECT_BUCKET, Feature.JSON, Feature.SNAPPY)


async def greet(
    ask: Ask, endpoint: Endpoint, address: Address, agent: str, *, tokens: bool = False
) -> frozenset[Feature]:
    """Introduce ourselves; the features that the node granted. With ``tokens`` writes tell their place in history."""
    features = await _hello(ask, agent, (*WANTED, Feature.MUTATION_SEQNO) if tokens else WANTED)
    if address.user is not None:
        await _login(ask, endpoint, address)
    await _select(ask, endpoint, address, ours=Feature.UPRIVER in features)
    return features


async def _hello(ask: Ask, agent: str, wanted: tuple[Feature, ...]) -> frozenset[Feature]:
    try:
        reply = await ask(Hello(agent=agent.encode(), features=wanted))
    except UnknownCommand:  # older than hello
        return frozenset()
    codes = memoryview(reply.value)
    return frozenset(Feature(int.from_bytes(codes[at : at + 2], "big")) for at in range(0, len(codes), 2))


async def _select(ask: Ask, endpoint: Endpoint, address: Address, *, ours: bool) -> None:
    bucket = address.bucket or BUCKET
    try:
        await ask(SelectBucket(name=bucket.encode()))  # only then do refusals of vbuckets carry the cluster map
    except KeyNotFound:
        if ours and not address.bucket:
            return  # it has one bucket, whatever its name
        raise KeyNotFound(f"{endpoint} has no bucket {bucket!r}") from None
    except (AccessDenied, AuthenticationFailed) as error:
        raise login_needed(endpoint, address, error) from None
    except UnknownCommand:  # a server of one bucket
        return


def login_needed(endpoint: Endpoint, address: Address, error: StatusError) -> StatusError:
    """A refusal of the first thing we asked for, with what to do about it."""
    if address.user is None:
        return AuthenticationFailed(f"{endpoint} wants a login: write upriver://user:password@{endpoint}")
    return AccessDenied(f"{endpoint} does not let {address.user!r} do this: {error.detail or error.text}")


async def _login(ask: Ask, endpoint: Endpoint, address: Address) -> None:
    if address.password is None:
        raise LoginImpossible(str(endpoint), f"there is no password for the user {address.user!r}")
    offered = (await ask(SaslListMechanisms())).value.decode(errors="replace").split()
    mechanism = next((wire for wire in _NAMES if wire in offered or _NAMES[wire] in offered), None)
    try:
        if mechanism is not None:
            await _scram(ask, endpoint, address, mechanism if mechanism in offered else _NAMES[mechanism])
        elif "PLAIN" in offered and (address.tls or endpoint.is_loopback):
            value = f"\0{address.user}\0{address.password}".encode()
            await ask(SaslAuth(mechanism=b"PLAIN", value=value))
        else:
            why = f"it offers only {', '.join(offered) or 'nothing'}"
            if "PLAIN" in offered:
                why += ", which would show the password to the network; use TLS (?tls=on)"
            raise LoginImpossible(str(endpoint), why)
    except AuthenticationFailed:
        raise AuthenticationFailed(f"{endpoint} does not know {address.user!r} with this password") from None


async def _scram(ask: Ask, endpoint: Endpoint, address: Address, mechanism: str) -> None:
    import scramp  # costs 20 ms, and most connections to a node of one's own need no login

    scram_error: type[Exception] = scramp.ScramException
    client: Any = scramp.ScramClient([_NAMES.get(mechanism, mechanism)], address.user, address.password)
    first = await ask(SaslAuth(mechanism=mechanism.encode(), value=client.get_client_first().encode()))
    if first.status != Status.AUTH_CONTINUE:
        raise LoginImpossible(str(endpoint), "it let us in before it proved to know the password")
    rounds = re.search(rb"(?:^|,)i=(\d{1,9})(?:,|$)", first.value)
    if rounds is None or int(rounds[1]) > ITERATIONS_MAX:
        raise LoginImpossible(str(endpoint), f"its challenge asks for no or for more than {ITERATIONS_MAX:,} rounds")
    try:
        client.set_server_first(first.value.decode())
        # Hashing takes milliseconds, in which other connections want to be served.
        final = await asyncio.to_thread(client.get_client_final)
        last = await ask(SaslStep(mechanism=mechanism.encode(), value=final.encode()))
        client.set_server_final(last.value.decode())
    except (scram_error, UnicodeDecodeError) as error:
        raise LoginImpossible(str(endpoint), f"it could not prove that it knows the password: {error}") from None
