"""Where a consumer starts and ends in each vbucket."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from upriver.client.cluster.cluster import Cluster
from upriver.client.cluster.node_queries import active_seqnos, copy_seqnos, failover_logs, owners
from upriver.client.consumer.progress import Progress
from upriver.client.consumer.settings import End, Start
from upriver.client.transport.backoff import Backoff
from upriver.errors import InvalidArguments, NoActiveCopy
from upriver.model import FailoverLog, StreamPosition

#: How long to wait for the owner of a vbucket that has none: a vbucket that moves has none for a moment.
OWNER_WAIT_S: Final = 2.0


async def owned_vbuckets(
    cluster: Cluster, wanted: Sequence[int], patience_s: float, *, active_only: bool = True
) -> list[int]:
    """These vbuckets, once the cluster map names an owner of each: leaving one out would leave out its documents."""
    loop, backoff = asyncio.get_running_loop(), Backoff()
    deadline = loop.time() + min(patience_s, OWNER_WAIT_S)
    while True:
        known = cluster.map
        missing = [number for number in wanted if known.owner(number) is None]
        if not missing:
            return list(wanted)
        pause_s = backoff.pause_s()
        if loop.time() + pause_s >= deadline:
            raise NoActiveCopy(missing, active_only=active_only)
        await asyncio.sleep(pause_s)
        await cluster.refresh(known)


async def start_positions(
    cluster: Cluster,
    vbuckets: Sequence[int],
    start: Start,
    saved: Mapping[int, Progress],
    *,
    active_only: bool = True,
) -> dict[int, Progress]:
    """The progress to start each vbucket from: the saved progress, else what ``start`` says."""
    out = {number: saved[number] for number in vbuckets if number in saved}
    given_progress = start.values() if isinstance(start, Mapping) else ()
    if any(isinstance(each, Progress) and each.is_unplaced for each in (*out.values(), *given_progress)):
        raise InvalidArguments("the progress was saved with tap and has no positions; continue with tap, or start over")
    rest = [number for number in vbuckets if number not in out]
    if isinstance(start, Mapping):
        for number in rest:
            given = start.get(number, Progress.beginning())
            out[number] = Progress.at(given) if isinstance(given, StreamPosition) else given
    elif start == "earliest":
        out |= dict.fromkeys(rest, Progress.beginning())
    else:
        high = await high_seqnos(cluster, rest, active_only=active_only)
        logs = await _failover_logs(cluster, rest, active_only=active_only)
        for number, log in logs.items():
            position = StreamPosition.at(log.newest.vbucket_uuid, high[number])
            out[number] = Progress(position, log, high[number])
    return out


async def end_seqnos(
    cluster: Cluster, vbuckets: Sequence[int], end: End, *, active_only: bool = True
) -> dict[int, int]:
    """The last seqno to read of each vbucket that has one."""
    if end == "never":
        return {}
    ends = end if isinstance(end, Mapping) else await high_seqnos(cluster, vbuckets, active_only=active_only)
    missing = [number for number in vbuckets if number not in ends]
    if missing:
        raise InvalidArguments(f"end names no seqno for vbucket {', '.join(map(str, missing[:10]))}")
    return {number: ends[number] for number in vbuckets}


async def high_seqnos(cluster: Cluster, vbuckets: Sequence[int], *, active_only: bool = True) -> dict[int, int]:
    """The current high seqnos of these vbuckets, where the cluster map says that they are read."""
    ask = active_seqnos if active_only else copy_seqnos
    out: dict[int, int] = {}
    for endpoint, numbers in (await owners(cluster, vbuckets)).items():
        found = await ask(await cluster.connection(endpoint))
        out |= {number: found[number] for number in numbers if number in found}
    missing = [number for number in vbuckets if number not in out]
    if missing:
        raise NoActiveCopy(missing, active_only=active_only)
    return out


async def _failover_logs(cluster: Cluster, vbuckets: Sequence[int], *, active_only: bool) -> dict[int, FailoverLog]:
    logs: dict[int, FailoverLog] = {}
    for endpoint, numbers in (await owners(cluster, vbuckets)).items():
        logs |= await failover_logs(await cluster.connection(endpoint), numbers)
    missing = [number for number in vbuckets if number not in logs]
    if missing:
        raise NoActiveCopy(missing, active_only=active_only)
    return logs
