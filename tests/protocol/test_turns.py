"""Who is served when."""

from dataclasses import dataclass

from upriver.protocol.turns import Turns


@dataclass
class Stream:
    name: str
    queued: bool = False


def test_who_woke_up_goes_first_and_nobody_starves() -> None:
    turns: Turns[Stream] = Turns()
    backfill = Stream("backfill")
    turns.again(backfill)
    served = []
    for number in range(12):
        turns.wake(Stream(f"live {number}"))
        stream = turns.next()
        assert stream is not None
        served.append(stream.name.split()[0])
        if stream is backfill:
            turns.again(stream)
    assert served == (["live"] * 3 + ["backfill"]) * 3
    assert len(turns) == 4


def test_nobody_stands_in_the_queue_twice() -> None:
    turns: Turns[Stream] = Turns()
    one, other = Stream("one"), Stream("other")
    assert turns.wake(one)
    assert not turns.wake(one)
    assert not turns.again(one)
    assert turns.again(other)
    assert turns.next() is one
    assert turns.wake(one)
    assert {id(turns.next()), id(turns.next())} == {id(one), id(other)}
    assert turns.next() is None


def test_after_the_end_nobody_has_a_turn() -> None:
    turns: Turns[Stream] = Turns()
    turns.wake(Stream("one"))
    turns.again(Stream("other"))
    turns.clear()
    assert not turns
    assert turns.next() is None
