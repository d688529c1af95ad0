"""The statistics of TAP, under the names that Couchbase's tools read.

Every known client counts once, connected or not, and so does every peer that sends. A client that is away shows what
its last connection sent, and its backlog. The totals are sums over all clients.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from upriver.model import VbucketState
from upriver.protocol.tap import TapClient, TapPosition

if TYPE_CHECKING:
    from upriver.node.tap.connections import TapConnection, TapReceiver
    from upriver.node.tap.service import TapService

Pairs = Iterator[tuple[str, object]]
#: The statistics that are summed over all clients.
_ADDED = ("total_backlog_size", "rec_fetched", "qlen", "items_sent", "bytes_sent", "unacked", "retry_later")


def tap_statistics(service: "TapService | None") -> Pairs:
    """The statistics of all clients and peers, and the totals."""
    if service is None:
        yield "ep_tap_count", 0
        return
    connections = {connection.client.name: connection for connection in service}
    clients, receivers = list(service.clients), sorted(service.receivers, key=lambda each: each.session.peer)
    totals = dict.fromkeys(_ADDED, 0)
    yield "ep_tap_count", len(clients) + len(receivers)
    for client in clients:
        for name, value in _client(service, client, connections.get(client.name)):
            yield f"eq_tapq:{client.name}:{name}", value
            if name in totals and isinstance(value, int):
                totals[name] += value
    for receiver in receivers:
        for name, value in _receiver(receiver):
            yield f"eq_tapq:{receiver.session.peer}:{name}", value
    for name, total in totals.items():
        yield f"ep_tap_{name}", total
    yield "ep_tap_ack_interval", service.settings.ack_interval
    yield "ep_tap_ack_window_size", service.settings.window_messages_max
    yield "ep_tap_keepalive", service.settings.keep_alive_s
    yield "ep_tap_noop_interval", service.settings.noop_interval_s
    yield "ep_tap_backoff_period", service.settings.backoff_s
    yield "ep_tap_online_update", _said(service.online_update.running)


def _client(service: "TapService", client: TapClient, connection: "TapConnection | None") -> Pairs:
    yield "type", "producer"
    yield "created", int(client.created)
    yield "connected", _said(connection is not None)
    yield "flags", client.flags
    yield "registered", _said(client.registered)
    if client.registered:
        yield "persisted", _said(service.registry.is_written(client.name))
    yield "reconnects", client.reconnects
    if connection is None:
        yield from _away(service, client)
        return
    producer = connection.producer
    window, streams = producer.window, producer.streams.values()
    yield "vb_filter", _vbuckets(producer.plan.vbuckets or producer.streams)
    yield "ack_window_full", _said(producer.plan.acks and not producer.room)
    yield "total_backlog_size", producer.backlog
    yield "rec_fetched", producer.changes_sent
    yield "qlen", producer.queued
    yield "items_sent", producer.messages_sent
    yield "bytes_sent", producer.bytes_sent_total
    yield "unacked", window.messages
    yield "retry_later", producer.retrying
    yield "ttl_expired", producer.tired
    for stream in sorted(streams, key=lambda each: each.number):
        yield f"vb_{stream.number}:state", stream.phase.value
        yield f"vb_{stream.number}:backlog", stream.backlog
        yield f"vb_{stream.number}:backfilled", stream.backfilled
        yield f"vb_{stream.number}:items_sent", stream.changes_sent
        yield f"vb_{stream.number}:last_sent_seqno", stream.seqno


def _away(service: "TapService", client: TapClient) -> Pairs:
    named, positions = client.plan is not None and client.plan.vbuckets is not None, client.positions
    waiting = 0 if client.done else sum(_waiting(service, *p, named=named) for p in positions.items())
    yield "vb_filter", _vbuckets(positions)
    yield "ack_window_full", _said(False)
    yield "total_backlog_size", waiting
    yield "rec_fetched", client.changes_sent
    yield "qlen", waiting
    yield "items_sent", client.messages_sent
    yield "bytes_sent", client.bytes_sent
    yield "unacked", 0
    yield "retry_later", 0


def _waiting(service: "TapService", number: int, tap_position: TapPosition, *, named: bool) -> int:
    """The most changes of a vbucket that a client at this position will get: all if its branch has ended."""
    vbucket = service.source.vbucket(number)
    if vbucket is None or not (named or vbucket.state is VbucketState.ACTIVE):
        return 0
    is_there = tap_position.position.vbucket_uuid == vbucket.failover_log.newest.vbucket_uuid
    return max(0, vbucket.high_seqno - (tap_position.position.seqno if is_there else 0))


def _receiver(receiver: "TapReceiver") -> Pairs:
    consumer = receiver.consumer
    yield "type", "consumer"
    yield "created", int(consumer.created)
    yield "connected", "true"
    yield "vb_filter", _vbuckets(consumer.fed)
    yield "num_messages", consumer.messages
    yield "num_changes", consumer.changes
    yield "num_refused", consumer.refused
    yield "peer_nacks", _said(consumer.peer_nacks)
    yield "peer_sends_checkpoints", _said(consumer.peer_sends_checkpoints)
    yield "backfilling", _vbuckets(consumer.backfilling)
    yield "finished", _said(consumer.finished)
    for number, checkpoint in sorted(consumer.checkpoints.items()):
        yield f"vb_{number}:checkpoint", checkpoint


def _vbuckets(numbers: Iterable[int]) -> str:
    return "{ " + " ".join(map(str, sorted(numbers))) + " }"


def _said(fact: bool) -> str:
    return "true" if fact else "false"
