"""The synchronous mover."""

from upriver.client import SyncMover
from upriver.node import start
from upriver.protocol.move import Phase


def test_it_moves_and_stops() -> None:
    with start(vbuckets=2) as source, start(vbuckets=2, initial_vbuckets="none") as destination:
        with SyncMover(source.address, destination.address, [0]) as mover:
            assert [step.phase for step in mover.carry_out()] == [Phase.MOVED]
            assert mover.bytes_passed_on > 0
        with SyncMover(source.address, destination.address, [1]) as mover:
            mover.stop()
            assert [step.phase for step in mover.carry_out()] == [Phase.WAITING]
