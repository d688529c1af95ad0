"""The groups of statistics, under the names that Couchbase's tools use."""

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Final

from upriver.engine import Vbucket
from upriver.errors import InvalidArguments, KeyNotFound, NotMyVbucket
from upriver.model import VbucketState
from upriver.node.auth.users import Role
from upriver.node.commands.keyvalue import checked_key
from upriver.node.commands.registry import ANY_USER, command, success
from upriver.node.session import Answer, Session
from upriver.node.state import NodeState
from upriver.node.streams.statistics import stream_statistics
from upriver.node.tap.statistics import tap_statistics
from upriver.wire import Response
from upriver.wire.dialects.memcached import Stat

#: The operations that store a client's value.
STORING: Final = ("set", "add", "replace", "append", "prepend")

#: Groups in which a single pair may read every vbucket.
SUMS: Final = frozenset({"", "memory", "vbucket-positions", "vbucket-items"})
#: One pair of the group vbucket-ends looks at this many records: a millisecond or two.
COUNTED_RECORDS_MAX: Final = 32_768

Pairs = Iterator[tuple[str, object]]
Group = Callable[[NodeState, list[str]], Pairs]

GROUPS: Final[dict[str, tuple[Group, Role]]] = {}


def group(name: str, role: Role = ANY_USER) -> Callable[[Group], Group]:
    """Register a group; the words after its name are its arguments."""

    def register(function: Group) -> Group:
        GROUPS[name] = (function, role)
        return function

    return register


@command(Stat, role=ANY_USER)
def stat(session: Session, request: Stat) -> Answer:
    """Return one group of statistics, pair by pair, with an empty pair at the end."""
    if request.key:
        checked_key(request.key)
    name, *arguments = request.key.decode(errors="replace").split() or [""]
    found = GROUPS.get(name)
    if found is None:
        known = ", ".join(sorted(filter(None, GROUPS)))
        raise KeyNotFound(f"unknown group of statistics {name!r}; choose from {known}")
    function, role = found
    session.authorize(role)
    pairs = function(session.node, arguments)
    if name in SUMS:
        session.charge(len(session.node.bucket))
    first = next(pairs, None)  # raises for wrong arguments before anything is sent
    return _answers(request, pairs if first is None else chain((first,), pairs))


def _answers(request: Stat, pairs: Iterable[tuple[str, object]]) -> Iterator[Response]:
    """Yield the responses while they are sent: all vbuckets in detail are too much for one turn."""
    for key, value in pairs:
        yield success(request, key=key.encode(), value=str(value).encode())
    yield success(request)


def _vbuckets(node: NodeState, arguments: list[str]) -> Iterator[Vbucket]:
    """Yield all vbuckets, or the one in the argument."""
    if not arguments:
        yield from node.bucket
        return
    if not arguments[0].isdecimal():
        raise InvalidArguments(f"invalid vbucket {arguments[0]!r}; use a number")
    yield node.bucket.vbucket(int(arguments[0]))


@group("")
def general(node: NodeState, arguments: list[str]) -> Pairs:  # noqa: ARG001
    """The whole node."""
    numbers, counters, now = node.bucket.statistics(), node.counters, node.clock()
    operations = numbers.operations
    yield "pid", os.getpid()
    yield "uptime", int(now - node.started)
    yield "time", int(now)
    yield "version", node.version
    yield "curr_connections", counters.connections
    yield "total_connections", counters.connections_total
    yield "rejected_conns", counters.connections_refused
    yield "auth_errors", counters.logins_failed
    yield "bytes_read", counters.bytes_read
    yield "bytes_written", counters.bytes_written
    yield "cmd_get", operations["get"]
    yield "get_hits", operations["get"] - operations["get_miss"]
    yield "get_misses", operations["get_miss"]
    yield "cmd_set", sum(operations.get(name, 0) for name in STORING)
    yield "cmd_flush", counters.flushes
    yield "cmd_delete", operations["delete"]
    yield "cmd_touch", operations.get("touch", 0) + operations.get("get_and_touch", 0)
    yield "curr_items", numbers.active_items
    yield "curr_items_tot", numbers.items
    yield "vb_active_expired", operations["expiration"]
    yield "mem_used", numbers.memory_bytes
    yield "ep_max_size", numbers.quota_bytes
    yield "ep_resident_items_rate", round(numbers.resident_ratio * 100, 2)
    queued = sum(vbucket.high_seqno - vbucket.persisted_seqno for vbucket in node.bucket)
    yield "ep_queue_size", queued
    yield "ep_flusher_todo", queued
    yield "ep_queue_bytes", numbers.queue_bytes
    flusher = node.bucket.flusher
    yield "ep_flusher_state", "running" if flusher.running and not flusher.paused else "paused"
    yield "ep_commit_num", numbers.commits
    yield "ep_dbname", node.bucket.storage.path
    yield "ep_db_file_size", numbers.disk_bytes
    for state in VbucketState:
        yield f"vb_{state.value}_num", sum(vbucket.state is state for vbucket in node.bucket)


@group("vbucket")
def vbucket_states(node: NodeState, arguments: list[str]) -> Pairs:
    """The role of each vbucket."""
    for vbucket in _vbuckets(node, arguments):
        yield f"vb_{vbucket.number}", vbucket.state.value


@group("vbucket-details")
def vbucket_details(node: NodeState, arguments: list[str]) -> Pairs:
    """All counters of each vbucket."""
    for vbucket in _vbuckets(node, arguments):
        name, table = f"vb_{vbucket.number}", vbucket.table
        yield name, vbucket.state.value
        yield f"{name}:num_items", table.items
        yield f"{name}:num_temp_items", 0
        yield f"{name}:num_tombstones", table.tombstones
        yield f"{name}:num_non_resident", table.evicted_items
        yield f"{name}:ht_memory", table.memory_bytes
        yield f"{name}:queue_size", table.pending_bytes
        yield f"{name}:high_seqno", vbucket.high_seqno
        yield f"{name}:last_persisted_seqno", vbucket.persisted_seqno
        yield f"{name}:purge_seqno", vbucket.purge_seqno
        yield f"{name}:uuid", vbucket.failover_log.newest.vbucket_uuid


@group("vbucket-seqno")
def vbucket_seqnos(node: NodeState, arguments: list[str]) -> Pairs:
    """The seqnos of each vbucket."""
    for vbucket in _vbuckets(node, arguments):
        name, snapshot = f"vb_{vbucket.number}", vbucket.position.snapshot
        yield f"{name}:high_seqno", vbucket.high_seqno
        yield f"{name}:abs_high_seqno", vbucket.high_seqno
        yield f"{name}:last_persisted_seqno", vbucket.persisted_seqno
        yield f"{name}:purge_seqno", vbucket.purge_seqno
        yield f"{name}:uuid", vbucket.failover_log.newest.vbucket_uuid
        yield f"{name}:last_persisted_snap_start", snapshot.start
        yield f"{name}:last_persisted_snap_end", snapshot.end


@group("vbucket-positions")
def vbucket_positions(node: NodeState, arguments: list[str]) -> Pairs:
    """The position of each vbucket, all in one pair: a thousand pairs would cost more than the query.

    One line per vbucket: number, role, uuid, high, persisted and purge seqno, and the seqno from which every version is
    kept.
    """
    lines = (
        f"{vbucket.number} {vbucket.state.value} {vbucket.failover_log.newest.vbucket_uuid} {vbucket.high_seqno} "
        f"{vbucket.persisted_seqno} {vbucket.purge_seqno} {vbucket.exact_from}"
        for vbucket in _vbuckets(node, arguments)
    )
    yield "positions", "\n".join(lines)


@group("vbucket-items")
def vbucket_items(node: NodeState, arguments: list[str]) -> Pairs:
    """The items and tombstones of each vbucket, all in one pair. One line per vbucket: number, items, tombstones."""
    lines = (f"{each.number} {each.table.items} {each.table.tombstones}" for each in _vbuckets(node, arguments))
    yield "items", "\n".join(lines)


@group("vbucket-ends")
def vbucket_ends(node: NodeState, arguments: list[str]) -> Pairs:
    """Where ranges end that deliver a given number of changes.

    An argument is VBUCKET:AFTER:MOST. The value has the last seqno for which at most MOST changes after AFTER are
    delivered, and how many these are. If there are fewer than MOST, and the seqno is below the high seqno, more may
    follow: the node has looked at enough records for one pair.
    """
    asked = [argument.split(":") for argument in arguments]
    for words in asked:
        if len(words) != 3 or not all(word.isdecimal() and len(word) <= 19 for word in words):
            raise InvalidArguments(f"invalid range {':'.join(words)!r}; use VBUCKET:AFTER:MOST")
    for number, after, most in (map(int, words) for words in asked):
        try:
            vbucket = node.bucket.vbucket(number)
        except NotMyVbucket:
            continue
        end, visible = vbucket.table.visible_end(after, vbucket.high_seqno, most, COUNTED_RECORDS_MAX)
        yield f"{number}", f"{end} {visible}"


@group("failovers")
def failovers(node: NodeState, arguments: list[str]) -> Pairs:
    """The failover logs."""
    for vbucket in _vbuckets(node, arguments):
        name = f"vb_{vbucket.number}"
        yield f"{name}:num_entries", len(vbucket.failover_log)
        for place, entry in enumerate(vbucket.failover_log):
            yield f"{name}:{place}:id", entry.vbucket_uuid
            yield f"{name}:{place}:seq", entry.seqno


@group("checkpoint")
def checkpoints(node: NodeState, arguments: list[str]) -> Pairs:
    """The checkpoints, and the cursors that read them."""
    for vbucket in _vbuckets(node, arguments):
        name = f"vb_{vbucket.number}"
        yield f"{name}:state", vbucket.state.value
        yield f"{name}:open_checkpoint_id", vbucket.checkpoints.open_id
        yield f"{name}:last_closed_checkpoint_id", vbucket.checkpoints.last_closed_id
        yield f"{name}:persisted_checkpoint_id", vbucket.checkpoints.persisted_id
        yield f"{name}:num_checkpoint_items", vbucket.high_seqno - vbucket.persisted_seqno
        yield f"{name}:num_conn_cursors", len(vbucket.cursors)
        # A copy of the names only: there may be thousands, and cursors may come and go between two pairs.
        for cursor_name in list(vbucket.cursors):
            cursor = vbucket.cursors.get(cursor_name)
            if cursor is not None:
                seqno, backlog = cursor.seqno, cursor.backlog
                yield f"{name}:{cursor_name}:cursor_seqno", seqno
                yield f"{name}:{cursor_name}:backlog", backlog


@group("tap")
def tap_connections(node: NodeState, arguments: list[str]) -> Pairs:  # noqa: ARG001
    """TAP clients, connected or registered, and peers that send."""
    return tap_statistics(node.tap)


@group("upr")
def upr_connections(node: NodeState, arguments: list[str]) -> Pairs:  # noqa: ARG001
    """Connections whose streams speak `upr`."""
    return stream_statistics(node.streams, "upr")


@group("dcp")
def dcp_connections(node: NodeState, arguments: list[str]) -> Pairs:  # noqa: ARG001
    """Connections whose streams speak `dcp`, and those without streams."""
    return stream_statistics(node.streams, "dcp")


@group("memory")
def memory(node: NodeState, arguments: list[str]) -> Pairs:  # noqa: ARG001
    """The use of memory."""
    numbers = node.bucket.statistics()
    yield "mem_used", numbers.memory_bytes
    yield "ep_max_size", numbers.quota_bytes
    yield "ep_history_bytes", numbers.history_bytes
    yield "ep_evicted_bytes", numbers.evicted_bytes
    yield "ep_resident_items_rate", round(numbers.resident_ratio * 100, 2)


@group("reset", role=Role.ADMIN)
def reset(node: NodeState, arguments: list[str]) -> Pairs:  # noqa: ARG001
    """Reset the counters; current values, such as open connections, stay."""
    ledger, counters = node.bucket.ledger, node.counters
    node.bucket.operations.clear()
    ledger.gets = ledger.get_misses = ledger.sets = ledger.deletes = ledger.expirations = 0
    counters.connections_total = counters.connections
    counters.connections_refused = counters.logins_failed = counters.flushes = 0
    counters.bytes_read = counters.bytes_written = 0
    return iter(())
