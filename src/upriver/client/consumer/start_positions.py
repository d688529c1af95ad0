"""Where a consumer starts and ends in each vbucket."""

from collections.abc import Mapping, Sequence

from upriver.client.cluster.cluster import Cluster
from upriver.client.cluster.node_queries import active_seqnos, failover_logs, owners
from upriver.client.consumer.progress import Progress
from upriver.client.consumer.settings import End, Start
from upriver.errors import InvalidArguments, StreamRefused
from upriver.model import FailoverLog, StreamPosition


async def start_positions(
    cluster: Cluster, vbuckets: Sequence[int], start: Start, saved: Mapping[int, Progress]
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
        high, logs = await high_seqnos(cluster, rest), await _failover_logs(cluster, rest)
        for number, log in logs.items():
            position = StreamPosition.at(log.newest.vbucket_uuid, high[number])
            out[number] = Progress(position, log, high[number])
    return out


async def end_seqnos(cluster: Cluster, vbuckets: Sequence[int], end: End) -> dict[int, int]:
    """The last seqno to read of each vbucket that has one."""
    if end == "never":
        return {}
    ends = end if isinstance(end, Mapping) else await high_seqnos(cluster, vbuckets)
    missing = [number for number in vbuckets if number not in ends]
    if missing:
        raise InvalidArguments(f"end names no seqno for vbucket {', '.join(map(str, missing[:10]))}")
    return {number: ends[number] for number in vbuckets}


async def high_seqnos(cluster: Cluster, vbuckets: Sequence[int]) -> dict[int, int]:
    """The current high seqnos of these vbuckets."""
    out: dict[int, int] = {}
    endpoints = {cluster.map.owner(number) for number in vbuckets}
    for endpoint in endpoints:
        if endpoint is not None:
            out |= await active_seqnos(await cluster.connection(endpoint))
    missing = [number for number in vbuckets if number not in out]
    if missing:
        raise StreamRefused(missing[0], "no node of the cluster has it active")
    return out


async def _failover_logs(cluster: Cluster, vbuckets: Sequence[int]) -> dict[int, FailoverLog]:
    logs: dict[int, FailoverLog] = {}
    for endpoint, numbers in (await owners(cluster, vbuckets)).items():
        logs |= await failover_logs(await cluster.connection(endpoint), numbers)
    missing = [number for number in vbuckets if number not in logs]
    if missing:
        raise StreamRefused(missing[0], "no node of the cluster has it; check the cluster map")
    return logs
