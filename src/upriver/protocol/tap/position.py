"""The position of a TAP client in a vbucket, and what it was promised there.

Theory of operation. A position says up to where a client has acknowledged, and which changes it never asked for; all
others were acknowledged or are still owed to it. A client that reconnects sends a new request, and everything owed is
still sent: a new date counts only up to the position. A later date changes nothing. With an earlier date the changes
before the position that the client did not want then are sent as well: all that are new enough, because it is unknown
which of them it holds.

A client that acknowledges nothing can only say with the date what it has: there each new date counts for everything
that exists.
"""

import dataclasses
from dataclasses import dataclass
from typing import Final

from upriver.model import Snapshot, StreamPosition
from upriver.protocol.tap.connect_plan import TapPlan

#: A position on an unknown branch: no history continues from it.
LOST: Final = StreamPosition.at(0, 1)
#: Every change is older.
NEVER: Final = 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TapPosition:
    """A position in one vbucket. Changes behind it are owed, unless they were left out."""

    #: Everything up to here is acknowledged; the client may hold more, up to the snapshot's end.
    position: StreamPosition
    #: Up to here the client has been sent every deletion that still exists. That is beyond the position where changes
    #: are sent again for an earlier date.
    known: int
    #: Changes before this second of the epoch are left out, up to the seqno ``until``. At 0 the client wants a full
    #: copy and starts over.
    since: int
    until: int
    #: How it was served.
    acks: bool
    keys_only: bool
    #: It belongs to a dump that did not finish.
    dumping: bool

    @classmethod
    def first(cls, plan: TapPlan, vbucket_uuid: int = 0, seqno: int = 0, purge_seqno: int = 0) -> "TapPosition":
        """The first position of a new client, in a vbucket with this high seqno.

        The client may hold anything older than its date; purged deletions cannot be sent.
        """
        start = seqno if plan.future_only else 0
        return cls(
            position=StreamPosition(vbucket_uuid, start, Snapshot(start, seqno)),
            known=max(start, purge_seqno),
            since=plan.since,
            until=seqno,
            acks=plan.acks,
            keys_only=plan.keys_only,
            dumping=plan.dump,
        )

    @classmethod
    def at_checkpoint(
        cls, plan: TapPlan, start: int | None, vbucket_uuid: int, seqno: int, purge_seqno: int
    ) -> "TapPosition":
        """The position of a client whose newest checkpoint begins after ``start``; None if we no longer have it.

        The client may hold some or all of that checkpoint, and of what follows.
        """
        first = cls.first(plan, vbucket_uuid, seqno, purge_seqno)
        if start is None:
            return dataclasses.replace(first, position=LOST)
        position = StreamPosition(vbucket_uuid, start, Snapshot(start, max(start, seqno)))
        return dataclasses.replace(first, position=position, known=start, until=start)

    @property
    def reached(self) -> int:
        """The client may hold changes up to here."""
        return self.position.snapshot.end

    def under(self, plan: TapPlan, seqno: int) -> "TapPosition":
        """The position for a client that reconnects with another plan; the vbucket has this high seqno.

        A client that asks for live changes only gets what it is owed, and nothing before.
        """
        lacks_values = self.keys_only and not plan.keys_only
        since, until, start = self.since, self.until, self.position.seqno
        if plan.future_only:
            if lacks_values:
                since, until = NEVER, start
        else:
            if plan.since < since or lacks_values or plan.takeover or (plan.dump and not self.dumping):
                start = 0
            if not self.acks:
                since, until = plan.since, seqno
            elif start < self.position.seqno or plan.since < since:
                since, until = min(since, plan.since), max(until, self.position.seqno)
        return TapPosition(
            position=StreamPosition(self.position.vbucket_uuid, start, Snapshot(start, self.reached)),
            known=self.known,
            since=since,
            until=until,
            acks=plan.acks,
            keys_only=plan.keys_only,
            dumping=plan.dump,
        )
