"""The engine as a TAP consumer's store.

A replica or pending copy takes every change, because its peer writes the history. An active vbucket has writers of its
own: there the newer version wins, by the rules for all changes with a revision. A change that loses is acknowledged and
dropped, because its sender must not try again and will receive our version.
"""

from upriver.engine import Vbucket
from upriver.errors import KeyExists, Locked, NotMyVbucket, TemporaryFailure
from upriver.model import Event, VbucketState
from upriver.node.state import NodeState
from upriver.node.tap.online_update import OnlineUpdate
from upriver.protocol.tap import ReceivedChange
from upriver.wire.dialects.tap import Control


class EngineTapSink:
    """A node's bucket, as the sink of its TAP peers."""

    __slots__ = ("_node", "_online_update")

    def __init__(self, node: NodeState, online_update: OnlineUpdate) -> None:
        self._node = node
        self._online_update = online_update

    def store(self, change: ReceivedChange) -> None:
        """Store a change."""
        vbucket = self._not_dead(change.vbucket)
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

    def _not_dead(self, number: int) -> Vbucket:
        """The vbucket, unless it is dead. A dead one keeps its data: its successor may not have all of it yet."""
        vbucket = self._node.bucket.vbucket(number)
        if vbucket.state is VbucketState.DEAD:
            raise NotMyVbucket("the vbucket is dead", vbucket=number)
        return vbucket

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

    def start_over(self, vbucket: int) -> None:
        """Drop a copy's data: all of the vbucket comes again."""
        found = self._not_dead(vbucket)
        if found.state is not VbucketState.ACTIVE and found.high_seqno:
            found.start_over()

    def flush(self, vbuckets: frozenset[int], ttl: int, mark: int) -> None:
        """Flush these vbuckets, or all if none is given.

        A vbucket that has seen this flush before is left alone, so that a flush in a ring of nodes ends where it began
        and spares later writes. A flush without a mark, which cannot be recognised, ends where a vbucket is empty.
        """
        for vbucket in self._node.bucket:
            if vbuckets and vbucket.number not in vbuckets:
                continue
            if mark in vbucket.flush_marks or not (mark or vbucket.high_seqno):
                continue
            if vbucket.state is VbucketState.ACTIVE:
                vbucket.flush(ttl, mark)
            elif vbucket.state is not VbucketState.DEAD:
                vbucket.start_over()

    def set_state(self, vbucket: int, state: VbucketState) -> None:
        """Change the role of a vbucket, and create it if needed.

        An active vbucket has writes that no other copy has, so a peer cannot make it a copy. A peer tries that when it
        repeats a takeover whose end it has missed.
        """
        node = self._node
        found = node.bucket.existing(vbucket)
        if found is None:
            node.bucket.create_vbucket(vbucket, state)
        elif found.state is VbucketState.ACTIVE and state in (VbucketState.PENDING, VbucketState.REPLICA):
            node.log.warning("vbucket %d stays active: a TAP peer wanted it to be %s", vbucket, state.value)
            raise KeyExists(f"the vbucket is active here and does not become {state.value} for a peer", vbucket=vbucket)
        else:
            found.set_state(state)

    def online_update(self, control: Control) -> None:
        """Start, stop or revert an online update."""
        self._online_update.control(control)
