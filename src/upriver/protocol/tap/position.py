"""Where a TAP client stands in a vbucket, and what it was promised there.

Theory of operation. A place says up to where a client has acknowledged, and which changes it never asked for; all the
others were acknowledged or are owed to it. Whoever comes back asks anew, and nothing that is owed is given up for that:
a new date counts only up to where the place has come. A later one adds nothing, and so the client goes on. With an
earlier one it goes on too, and the changes before its place, which it did not want then, are sent as well: all of them
that are not too old, because nobody knows which of them it holds.

To who acknowledges nothing the date is the only way to say what it has: there each new one counts for all that exists.
"""

from dataclasses import dataclass
from typing import Final

from upriver.model import Snapshot, StreamPosition
from upriver.protocol.tap.connect_plan import TapPlan

#: A position on no branch at all: no history leads on from it.
LOST: Final = StreamPosition.at(0, 1)
#: Every change is older.
NEVER: Final = 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TapPosition:
    """A place in one vbucket. What lies behind the position is owed, unless it was left out."""

    #: Everything up to here is acknowledged, and of what follows some may have arrived, up to the snapshot's end.
    position: StreamPosition
    #: Up to here the client has been told of every deletion that it can be told of. That is beyond the position where
    #: something is sent again, for an earlier date.
    known: int
    #: What is older than this second of the epoch is left out, up to the seqno ``until``. At 0 the client wants a copy,
    #: and is told to start over with it.
    since: int
    until: int
    #: How it was served.
    acks: bool
    keys_only: bool
    #: It is the place of a dump that has not come to its end.
    dumping: bool

    @classmethod
    def first(cls, plan: TapPlan, vbucket_uuid: int = 0, seqno: int = 0, purge_seqno: int = 0) -> "TapPosition":
        """Where a client begins that has not been here before, in a vbucket that has come to this seqno.

        It may hold whatever is older than its date; of what is purged already nobody can tell it.
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

    @property
    def reached(self) -> int:
        """The client may hold changes up to here."""
        return self.position.snapshot.end

    def under(self, plan: TapPlan, seqno: int) -> "TapPosition":
        """Where the client goes on that comes back to here with another plan; the vbucket has come to this seqno.

        Who asks for what comes gets what it is owed, and nothing before.
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
