"""The engine as a TAP consumer's store.

A copy (replica or pending) takes what it is told: its peer is the one that writes the history. An active vbucket has
writers of its own, so there the newer version wins by the rules of all changes that come with a revision; what loses is
taken and forgotten, because its sender is to learn of ours and not to try again.
"""

from upriver.engine import Vbucket
from upriver.errors import KeyExists, Locked, NotMyVbucket, TemporaryFailure
from upriver.model import Event, VbucketState
from upriver.node.state import NodeState
from upriver.node.tap.online_update import OnlineUpdate
from upriver.protocol.tap import ReceivedChange
from upriver.wire.dialects.tap import Control


class EngineTapSink:
    """A node's bucket."""

    __slots__ = ("_node", "_online_update")

    def __init__(self, node: NodeState, online_update: OnlineUpdate) -> None:
        self._node = node
        self._online_update = online_update

    def store(self, change: ReceivedChange) -> None:
        """Take a change."""
        vbucket = self._alive(change.vbucket)
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

    def _alive(self, number: int) -> Vbucket:
        """A vbucket that takes part. A dead one keeps what it has: its successor may not have it yet."""
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
        """Everything of this vbucket comes anew: a copy drops what it has."""
        found = self._alive(vbucket)
        if found.state is not VbucketState.ACTIVE and found.high_seqno:
            found.start_over()

    def flush(self, vbuckets: frozenset[int], ttl: int, mark: int) -> None:
        """Empty these vbuckets; all that there are if none is named.

        One that has seen this very flush is left alone: so a flush that goes round in a ring of nodes ends where it
        began, and takes nothing with it that was written behind it. Of a peer whose flushes have no mark, and look all
        the same, one that finds nothing to do goes no further.
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
        """Give a vbucket, which may not exist yet, a role.

        One that is active has taken writes that nobody else has: it does not become a copy because a peer says so, as
        one does that repeats a takeover and has missed that it was done.
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
