"""Queries to the nodes of a cluster: statistics, the status of each vbucket, and failover logs."""

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from upriver.client.cluster.cluster import Cluster
from upriver.client.transport.address import Endpoint
from upriver.client.transport.connection import REQUEST_TIMEOUT_S, Connection
from upriver.errors import KeyNotFound, NotMyVbucket, TimedOut, WireError
from upriver.model import FailoverEntry, FailoverLog, VbucketState
from upriver.wire import memcached
from upriver.wire.dialects.memcached import GetAllVbucketSeqnos, GetFailoverLog, Stat

_ENTRY_BYTES: Final = 16
_KEY_BYTES_MAX: Final = 250
_ENDS: Final = "vbucket-ends"
_STATES: Final = {state.value: state for state in VbucketState}
_SEQNOS: Final = re.compile(r"vb_(\d+):(high_seqno|last_persisted_seqno|purge_seqno|uuid)")


class VbucketStatus(NamedTuple):
    """The status of one copy of a vbucket."""

    number: int
    state: VbucketState
    vbucket_uuid: int
    high_seqno: int
    persisted_seqno: int
    purge_seqno: int
    #: The node keeps every version from this seqno on, for ranges with exact ends; None if it does not support them.
    exact_from: int | None = None


async def statistics(connection: Connection, group: str = "") -> dict[str, str]:
    """Return one group of a node's statistics."""
    replies = await connection.ask_list(Stat(key=group.encode()))
    return {reply.key.decode(errors="replace"): reply.value.decode(errors="replace") for reply in replies}


async def vbuckets_of(connection: Connection) -> dict[int, VbucketStatus]:
    """Return all copies that a node has, in any role."""
    if connection.is_upriver_node:
        text = (await statistics(connection, "vbucket-positions")).get("positions", "")
        return {status.number: status for status in map(_status, filter(None, text.split("\n")))}
    states, seqnos = await asyncio.gather(statistics(connection, "vbucket"), statistics(connection, "vbucket-seqno"))
    return _from_statistics(states, seqnos)


async def active_vbuckets(cluster: Cluster, wanted: Sequence[int] | None = None) -> dict[int, VbucketStatus]:
    """Return the active copies of these vbuckets, or of all, as their owners in the cluster map report them."""
    by_owner = await owners(cluster, wanted)
    connections = [await cluster.connection(endpoint) for endpoint in by_owner]
    found = await asyncio.gather(*map(vbuckets_of, connections))
    active: dict[int, VbucketStatus] = {}
    for numbers, statuses in zip(by_owner.values(), found, strict=True):
        for number in numbers:
            status = statuses.get(number)
            if status is not None and status.state is VbucketState.ACTIVE:
                active[number] = status
    return active


async def active_seqnos(connection: Connection) -> dict[int, int]:
    """The vbuckets that are active on a node, each with its high seqno."""
    request = GetAllVbucketSeqnos(state=memcached.VbucketState.ACTIVE)
    return _seqnos_in((await connection.ask(request)).value)


async def copy_seqnos(connection: Connection) -> dict[int, int]:
    """The copies on a node that are not dead, each with its high seqno."""
    return _seqnos_in((await connection.ask(GetAllVbucketSeqnos())).value)


async def item_counts(connection: Connection) -> dict[int, int]:
    """The number of items and tombstones of each vbucket; empty if the node cannot tell."""
    if not connection.is_upriver_node:
        return {}
    try:
        text = (await statistics(connection, "vbucket-items")).get("items", "")
    except KeyNotFound:  # an earlier version
        return {}
    lines = (map(int, line.split(" ")) for line in text.split("\n") if line)
    return {number: items + tombstones for number, items, tombstones in lines}


class VisibleEnd(NamedTuple):
    """The end of a range, and the number of changes that it delivers."""

    end_seqno: int
    changes: int


async def visible_ends(connection: Connection, asked: Mapping[int, tuple[int, int]]) -> dict[int, VisibleEnd]:
    """The last ends of ranges that deliver a limited number of changes; empty if the node cannot tell.

    ``asked`` has the start of each vbucket's range and the limit.
    """
    if not asked or not connection.is_upriver_node:
        return {}
    groups = [_ENDS]
    for number, (after, most) in asked.items():
        argument = f" {number}:{after}:{most}"
        if len(groups[-1]) + len(argument) > _KEY_BYTES_MAX:
            groups.append(_ENDS)
        groups[-1] += argument
    try:
        found = await asyncio.gather(*(statistics(connection, group) for group in groups))
    except KeyNotFound:  # an earlier version
        return {}
    return {int(number): VisibleEnd(*map(int, value.split(" "))) for pairs in found for number, value in pairs.items()}


async def owners(cluster: Cluster, wanted: Sequence[int] | None = None) -> dict[Endpoint, list[int]]:
    """Return the vbuckets of each owner in the newest map, without those that have no owner."""
    known = await cluster.open()
    by_owner: dict[Endpoint, list[int]] = {}
    for number in range(known.vbuckets) if wanted is None else wanted:
        endpoint = known.owner(number)
        if endpoint is not None:
            by_owner.setdefault(endpoint, []).append(number)
    return by_owner


async def failover_logs(connection: Connection, numbers: Iterable[int]) -> dict[int, FailoverLog]:
    """Return the failover logs of these vbuckets, without those that the node does not have."""
    asked = {number: connection.post(GetFailoverLog(vbucket=number)) for number in numbers}
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            replies = dict(zip(asked, await asyncio.gather(*asked.values()), strict=True))
    except TimeoutError:
        connection.give_up_if_silent()
        raise TimedOut(
            str(connection.endpoint), f"no reply to a failover log request within {REQUEST_TIMEOUT_S:g} s"
        ) from None
    logs: dict[int, FailoverLog] = {}
    for number, reply in replies.items():
        error = reply.error(number)
        if error is None:
            logs[number] = _log(reply.value)
        elif not isinstance(error, NotMyVbucket):
            raise error
    return logs


def _seqnos_in(value: bytes) -> dict[int, int]:
    """The entries of a reply: vbucket and seqno, 2 and 8 bytes each."""
    return {
        int.from_bytes(value[at : at + 2], "big"): int.from_bytes(value[at + 2 : at + 10], "big")
        for at in range(0, len(value) - 9, 10)
    }


def _log(data: bytes) -> FailoverLog:
    if not data or len(data) % _ENTRY_BYTES:
        raise WireError(0, "failover entries of 16 bytes", f"{len(data)} bytes")
    numbers = [int.from_bytes(data[at : at + 8], "big") for at in range(0, len(data), 8)]
    return FailoverLog(tuple(map(FailoverEntry, numbers[::2], numbers[1::2])))


def _status(line: str) -> VbucketStatus:
    number, state, *rest = line.split(" ")
    return VbucketStatus(int(number), _STATES[state], *map(int, rest))


def _from_statistics(states: dict[str, str], seqnos: dict[str, str]) -> dict[int, VbucketStatus]:
    details: dict[int, dict[str, int]] = {}
    for name, value in seqnos.items():
        found = _SEQNOS.fullmatch(name)
        if found is not None and value.isdigit():
            details.setdefault(int(found[1]), {})[found[2]] = int(value)
    return {
        number: VbucketStatus(
            number,
            _STATES.get(states.get(f"vb_{number}", ""), VbucketState.DEAD),
            each.get("uuid", 0),
            each.get("high_seqno", 0),
            each.get("last_persisted_seqno", 0),
            each.get("purge_seqno", 0),
        )
        for number, each in details.items()
    }
