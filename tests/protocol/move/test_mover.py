"""The mover's decisions: each answer that it gets leads to one next step."""

from upriver.protocol.move.mover import Link, MoverSteps, Phase, Send, moved_map


def test_a_refused_open_is_tried_again() -> None:
    mover = MoverSteps("", [0])
    mover.start()
    mover.actions()
    mover.connected(Link.SOURCE)
    (send,) = mover.actions()
    assert isinstance(send, Send)
    refusal = bytes([0x81, 0x50, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0]) + bytes(send.data)[12:16] + bytes(8)
    mover.received(Link.SOURCE, refusal)
    assert mover.moves[0].phase is Phase.WAITING
    assert "refused" in mover.moves[0].reason


def test_the_map_after_a_move() -> None:
    config = {"rev": 7, "vBucketServerMap": {"vBucketMap": [[0, 1], [0, 1]], "serverList": ["a", "b"]}}
    moved = moved_map(config, 1, 1)
    assert (moved["rev"], moved["revEpoch"]) == (8, 2)
    assert moved["vBucketServerMap"]["vBucketMap"] == [[0, 1], [1, -1]]
    assert config["rev"] == 7
