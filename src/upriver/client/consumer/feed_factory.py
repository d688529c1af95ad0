"""Where a consumer begins, where it ends, and how it gets a connection for its streams."""

from collections.abc import Mapping, Sequence

from upriver import wire
from upriver.client.cluster.cluster import Cluster
from upriver.client.cluster.node_queries import failover_logs, owners
from upriver.client.consumer.feed import Feed, Owner
from upriver.client.consumer.progress import Progress
from upriver.client.consumer.settings import DRAFTS, ConsumerSettings, End, Start
from upriver.client.consumer.tracked_vbuckets import TrackedVbuckets
from upriver.client.transport.address import Endpoint
from upriver.client.transport.connection import Connection
from upriver.client.transport.handshake import login_needed
from upriver.errors import (
    AccessDenied,
    AuthenticationFailed,
    InvalidArguments,
    NodeUnavailable,
    StatusError,
    StreamRefused,
    UnknownCommand,
)
from upriver.model import FailoverLog, StreamPosition
from upriver.protocol.consumer import ConsumerOptions
from upriver.wire import MEMCACHED, dcp, memcached


async def opening_progress(
    cluster: Cluster, vbuckets: Sequence[int], start: Start, saved: Mapping[int, Progress]
) -> dict[int, Progress]:
    """Where each vbucket begins: where it was saved, else where it shall start."""
    out = {number: saved[number] for number in vbuckets if number in saved}
    given_progress = start.values() if isinstance(start, Mapping) else ()
    if any(isinstance(each, Progress) and each.is_unplaced for each in (*out.values(), *given_progress)):
        raise InvalidArguments("this progress is of tap, which tells no positions; go on with tap, or start over")
    rest = [number for number in vbuckets if number not in out]
    if isinstance(start, Mapping):
        for number in rest:
            given = start.get(number, Progress.beginning())
            out[number] = Progress.at(given) if isinstance(given, StreamPosition) else given
    elif start == "earliest":
        out |= dict.fromkeys(rest, Progress.beginning())
    else:
        high, logs = await high_seqnos(cluster, rest), await _failover_logs(cluster, rest)
        for number, log in logs.items():
            position = StreamPosition.at(log.newest.vbucket_uuid, high[number])
            out[number] = Progress(position, log, high[number])
    return out


async def range_ends(cluster: Cluster, vbuckets: Sequence[int], end: End) -> dict[int, int]:
    """The last seqno of each vbucket that has one."""
    if end == "never":
        return {}
    ends = end if isinstance(end, Mapping) else await high_seqnos(cluster, vbuckets)
    missing = [number for number in vbuckets if number not in ends]
    if missing:
        raise InvalidArguments(f"there is no end for vbucket {', '.join(map(str, missing[:10]))}")
    return {number: ends[number] for number in vbuckets}


async def high_seqnos(cluster: Cluster, vbuckets: Sequence[int]) -> dict[int, int]:
    """How far the sources of these vbuckets are now."""
    out: dict[int, int] = {}
    endpoints = {cluster.map.owner(number) for number in vbuckets}
    for endpoint in endpoints:
        if endpoint is not None:
            out |= await active_on(await cluster.connection(endpoint))
    lost = [number for number in vbuckets if number not in out]
    if lost:
        raise StreamRefused(lost[0], "no node of the cluster has it active")
    return out


async def active_on(connection: Connection) -> dict[int, int]:
    """The vbuckets that are active on a node, each with its high seqno."""
    request = memcached.GetAllVbucketSeqnos(state=memcached.VbucketState.ACTIVE)
    return seqnos_in((await connection.ask(request)).value)


def seqnos_in(value: bytes) -> dict[int, int]:
    """The high seqnos in an answer: vbucket and seqno, 2 and 8 bytes each."""
    return {
        int.from_bytes(value[at : at + 2], "big"): int.from_bytes(value[at + 2 : at + 10], "big")
        for at in range(0, len(value) - 9, 10)
    }


async def failover_log(cluster: Cluster, vbucket: int) -> FailoverLog:
    """The branches that the source of a vbucket has lived on."""
    return (await _failover_logs(cluster, [vbucket]))[vbucket]


async def _failover_logs(cluster: Cluster, vbuckets: Sequence[int]) -> dict[int, FailoverLog]:
    """The same for many, asked for all at once."""
    logs: dict[int, FailoverLog] = {}
    for endpoint, numbers in (await owners(cluster, vbuckets)).items():
        logs |= await failover_logs(await cluster.connection(endpoint), numbers)
    lost = [number for number in vbuckets if number not in logs]
    if lost:
        raise StreamRefused(lost[0], "no node of the cluster has it; look at the cluster map")
    return logs


async def open_feed(
    cluster: Cluster,
    endpoint: Endpoint,
    settings: ConsumerSettings,
    copies: TrackedVbuckets,
    owner: Owner,
    receive_bytes: int,
) -> Feed:
    """A connection to a node that is ready for streams."""
    if settings.stream_port is not None:
        endpoint = Endpoint(endpoint.host, settings.stream_port)
    if settings.dialect in DRAFTS:
        return await _open_draft(cluster, endpoint, settings, copies, owner, receive_bytes)
    connection = await cluster.fresh_connection(endpoint, receive_bytes=receive_bytes)
    try:
        await _open(connection, cluster, settings)
    except BaseException:
        await connection.close()
        raise
    options = ConsumerOptions(
        window_bytes=settings.window_bytes,
        noop_interval_s=settings.noop_interval_s,
        dialects=("dcp", "upr") if settings.dialect == "dcp" else ("upr",),
        starts_inclusive=not connection.is_upriver_node,
        acks_late=True,
    )
    return Feed(connection, copies, owner, options, columns=settings.decoded)


async def _open_draft(
    cluster: Cluster,
    endpoint: Endpoint,
    settings: ConsumerSettings,
    copies: TrackedVbuckets,
    owner: Owner,
    receive_bytes: int,
) -> Feed:
    """A draft has no open, no settings and, with the 12-byte header, no greeting."""
    draft = wire.DIALECTS[settings.dialect]
    greeting = draft.framing is MEMCACHED
    connection = await cluster.fresh_connection(endpoint, receive_bytes=receive_bytes, greeting=greeting)
    options = ConsumerOptions(window_bytes=0, noop_interval_s=0, expirations=False, dialects=("upr",), acks_late=True)
    return Feed(connection, copies, owner, options, columns=settings.decoded, draft=draft)


async def _open(connection: Connection, cluster: Cluster, settings: ConsumerSettings) -> None:
    node = str(connection.endpoint)
    controls = settings.own_controls(ours=connection.is_upriver_node, node=node)
    flags = dcp.OpenFlag.PRODUCER
    if settings.keys_only and not connection.is_upriver_node:
        flags |= dcp.OpenFlag.NO_VALUE
    try:
        await connection.ask(dcp.Open(name=settings.name.encode()[:200], flags=flags))
        for name, value in controls.items():
            await _set(connection, name, value)
    except (AccessDenied, AuthenticationFailed) as error:
        raise login_needed(connection.endpoint, cluster.address, error) from None
    except UnknownCommand:
        raise NodeUnavailable(node, "it streams nothing: it does not know the open of upr and dcp") from None


async def _set(connection: Connection, name: str, value: str) -> None:
    try:
        await connection.ask(dcp.Control(key=name.encode(), value=value.encode()))
    except StatusError as error:
        raise InvalidArguments(f"{name} = {value!r}: {error.detail or error.text}") from None
