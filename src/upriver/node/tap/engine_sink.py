"""The engine as a TAP consumer's store.

A replica or pending copy takes every change, because its peer writes the history. An active vbucket has writers of its
own: there the newer version wins, by the rules for all changes with a revision. A change that loses is acknowledged and
dropped, because its sender must not try again and will receive our version.

A pending copy waits for the rest of its takeover. Over TAP that is the connection that last made it pending; from
others it accepts nothing. A copy that a stream with seqnos made pending waits for a branch of its source, which TAP
cannot continue, so TAP cannot take it over. A copy that a stream with seqnos feeds right now accepts nothing over TAP.
"""

from upriver.engine import Vbucket, new_uuid
from upriver.errors import KeyExists, Locked, NotMyVbucket, TemporaryFailure
from upriver.model import Event, VbucketState
from upriver.node.state import NodeState
from upriver.node.tap.online_update import OnlineUpdate
from upriver.protocol.tap import FlushMark, ReceivedChange
from upriver.wire.dialects.tap import Control


class EngineTapSink:
    """A node's bucket, as the sink of its TAP peers."""

    __slots__ = ("_node", "_online_update", "_takeovers")

    def __init__(self, node: NodeState, online_update: OnlineUpdate) -> None:
        self._node = node
        self._online_update = online_update
        #: The connection that each pending vbucket waits for.
        self._takeovers: dict[int, object] = {}

    def forget(self, peer: object) -> None:
        """A connection is closed. Another one may continue its takeovers: it makes the vbuckets pending again."""
        self._takeovers = {number: taker for number, taker in self._takeovers.items() if taker is not peer}
        self._node.fed_copies.forget_peer(peer)

    def store(self, change: ReceivedChange, peer: object) -> None:
        """Store a change."""
        vbucket = self._writable(change.vbucket, peer)
        if vbucket.state is VbucketState.ACTIVE:
            self._merge(vbucket, change)
        else:
            vbucket.receive(
                change.event,
                change.key,
                change.value,
                flags=change.flags,
                expiry=change.expiry,
                datatype=change.datatype,
                cas=change.cas,
                rev_seqno=change.rev_seqno,
                ttl=change.ttl,
            )

    def _writable(self, number: int, peer: object) -> Vbucket:
        """The vbucket, if the peer may write it. A dead one keeps its data, because its successor may not have all of
        it yet."""
        vbucket = self._node.bucket.vbucket(number)
        if vbucket.state is VbucketState.DEAD:
            raise NotMyVbucket("the vbucket is dead", vbucket=number)
        if self._awaits_another(vbucket, peer):
            raise NotMyVbucket("a pending copy accepts data only from its takeover", vbucket=number)
        if vbucket.state is not VbucketState.ACTIVE:
            self._node.fed_copies.note_peer(number, peer)
        return vbucket

    def _awaits_another(self, vbucket: Vbucket, peer: object) -> bool:
        """Whether the vbucket is pending, and not for this peer."""
        if vbucket.state is not VbucketState.PENDING:
            return False
        return not vbucket.assigns_seqnos or self._takeovers.get(vbucket.number) is not peer

    @staticmethod
    def _merge(vbucket: Vbucket, change: ReceivedChange) -> None:
        ledger = vbucket.table.ledger
        cas = change.cas or ledger.next_cas(ledger.clock())
        rev_seqno = change.rev_seqno or vbucket.table.next_rev_seqno(change.key)
        try:
            if change.event is Event.MUTATION:
                vbucket.set_with_meta(
                    change.key,
                    change.value,
                    cas=cas,
                    rev_seqno=rev_seqno,
                    flags=change.flags,
                    expiry=change.expiry,
                    datatype=change.datatype,
                    ttl=change.ttl,
                )
            else:
                vbucket.delete_with_meta(change.key, cas=cas, rev_seqno=rev_seqno, ttl=change.ttl)
        except Locked as error:
            raise TemporaryFailure("the key is locked", vbucket=vbucket.number) from error
        except KeyExists:
            pass  # ours wins

    def start_over(self, vbucket: int, peer: object) -> None:
        """Drop a copy's data: all of the vbucket comes again."""
        found = self._writable(vbucket, peer)
        if found.state is not VbucketState.ACTIVE and found.high_seqno:
            found.start_over()

    def flush(self, mark: FlushMark | None, spared: frozenset[int], ttl: int, peer: object) -> None:
        """Flush the vbuckets that the mark lists, without a mark all, as far as the peer may write them.

        It is one flush in all of them, and passed on as one. A vbucket that has seen it before is left alone, so that a
        flush in a ring of nodes ends where it began and spares later writes. A flush without a mark cannot be
        recognised; it ends where nothing is left to flush.
        """
        found = [v for v in self._node.bucket if v.number not in spared and (not mark or v.number in mark.vbuckets)]
        found = [v for v in found if v.state is not VbucketState.DEAD and not self._awaits_another(v, peer)]
        fed_copies = self._node.fed_copies
        found = [v for v in found if v.state is VbucketState.ACTIVE or not fed_copies.has_stream(v.number)]
        if not mark and not any(vbucket.high_seqno for vbucket in found):
            return
        number = mark.number if mark else new_uuid()
        for vbucket in found:
            if number not in vbucket.flush_marks:
                empty = vbucket.flush if vbucket.state is VbucketState.ACTIVE else vbucket.flush_copy
                empty(ttl, number)

    def set_state(self, vbucket: int, state: VbucketState, peer: object) -> None:
        """Change the role of a vbucket, and create it if needed.

        An active vbucket has writes that no other copy has, so a peer cannot make it a copy. A peer tries that when it
        repeats a takeover whose end it has missed.
        """
        node = self._node
        found = node.bucket.existing(vbucket)
        if found is None:
            found = node.bucket.create_vbucket(vbucket, state)
        elif found.state is VbucketState.ACTIVE and state in (VbucketState.PENDING, VbucketState.REPLICA):
            node.log.warning("vbucket %d stays active: a TAP peer wanted it to be %s", vbucket, state.value)
            raise KeyExists(f"the vbucket is active here and does not become {state.value} for a peer", vbucket=vbucket)
        else:
            # A takeover by TAP may be continued, or begin where nothing was received yet.
            may_claim = found.assigns_seqnos or not found.streamable
            if state is not found.state:
                node.fed_copies.check_no_stream(vbucket)
            if self._awaits_another(found, peer) and not (state is VbucketState.PENDING and may_claim):
                raise NotMyVbucket("a pending copy waits for another takeover", vbucket=vbucket)
            found.set_state(state)
        if state is VbucketState.PENDING:
            node.fed_copies.note_peer(vbucket, peer)
            found.assign_seqnos()
            self._takeovers[vbucket] = peer
        else:
            self._takeovers.pop(vbucket, None)
            if state is not VbucketState.REPLICA:
                node.fed_copies.end_peers(vbucket)

    def online_update(self, control: Control) -> None:
        """Start, stop or revert an online update."""
        self._online_update.control(control)
