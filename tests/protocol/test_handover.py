"""What the source of a takeover has done, and knows, at each step."""

from tests.node.laboratory import Laboratory
from upriver.model import VbucketState
from upriver.protocol.handover import Handover


def test_the_source_is_dead_first_and_knows_when_that_is_on_disk() -> None:
    laboratory = Laboratory()
    laboratory.bucket.create_vbucket(3)
    laboratory.write(3, b"k")
    called: list[bool] = []
    handover = Handover(laboratory.service.source, 3, "heir", lambda: called.append(handover.durable))
    assert (handover.dead, handover.durable) == (False, False)

    laboratory.disk_works = False
    handover.die()
    laboratory.settle()
    assert laboratory.bucket.vbucket(3).state is VbucketState.DEAD
    assert (handover.dead, handover.durable, called) == (True, False, [])

    laboratory.disk_works = True
    laboratory.settle()
    assert called == [True]
    assert laboratory.bucket.vbucket(3).heir == "heir"
    assert laboratory.bucket.vbucket(3).persisted_seqno == 1
