"""Answers leave in the order of their requests, whenever each is complete."""

from itertools import permutations

import pytest

from tests.support.in_memory_node import ManualScheduler
from upriver.errors import Busy
from upriver.node.session.answer_queue import AnswerQueue, Deferred
from upriver.wire import AnyResponse
from upriver.wire.dialects.memcached import Get


class Queue:
    """A queue, its scheduler, and how often there was something to send."""

    def __init__(self) -> None:
        self.scheduler = ManualScheduler()
        self.calls = 0
        self.answers = AnswerQueue(self.scheduler, self._called)

    def _called(self) -> None:
        self.calls += 1

    def deferred(self) -> Deferred:
        answer = Deferred(self.answers)
        self.answers.append(answer)
        return answer

    def sent(self) -> list[int]:
        """The opaques of the answers that are ready by now."""
        while self.scheduler.step():
            pass
        packets = self.answers.take()
        return [int.from_bytes(packets[at + 12 : at + 16], "big") for at in range(0, len(packets), 24)]


def answer_to(opaque: int) -> AnyResponse:
    return AnyResponse(opcode=0, opaque=opaque)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_answers_leave_in_the_order_of_requests(order: tuple[int, ...]) -> None:
    queue = Queue()
    waiting = [queue.deferred() for _ in range(3)]
    queue.answers.append_packets(answer_to(3).encode())
    sent: list[int] = []
    for number in order:
        waiting[number].complete(answer_to(number))
        sent += queue.sent()
    assert sent == [0, 1, 2, 3]
    assert (len(queue.answers.waiting), queue.answers.waiting_bytes) == (0, 0)


def test_answers_that_are_completed_together_are_released_once() -> None:
    queue = Queue()
    for answer in [queue.deferred() for _ in range(100)]:
        answer.complete(answer_to(1))
    assert queue.answers.waiting_bytes == 100 * 24
    assert queue.sent() == [1] * 100
    assert queue.calls == 1


def test_only_the_first_answer_counts() -> None:
    queue = Queue()
    answer = queue.deferred()
    answer.fail(Get(key=b"k", opaque=5), Busy())
    answer.complete(answer_to(6))
    assert answer.ended
    assert queue.sent()[:1] == [5]


def test_an_answer_that_is_complete_before_it_is_added_is_ready_at_once() -> None:
    queue = Queue()
    answer = Deferred(queue.answers)
    answer.complete(answer_to(9))
    queue.answers.append(answer)
    assert queue.answers.ready_bytes == 24
    assert queue.sent() == [9]


def test_an_answer_alone_is_not_copied() -> None:
    """A copy of 20 MiB takes longer than a turn."""
    queue = Queue()
    large = bytes(1000)
    queue.answers.add(large)
    assert queue.answers.ready_bytes == 1000
    assert queue.answers.take() is large
    assert queue.answers.ready_bytes == 0
    for packets in (b"1", b"", b"23"):
        queue.answers.add(packets)
    assert (queue.answers.ready_bytes, queue.answers.take(), queue.answers.take()) == (3, b"123", b"")


def test_those_that_may_wait_for_long_can_be_given_up() -> None:
    queue = Queue()
    short, long = queue.deferred(), queue.deferred()
    long.give_up = lambda: long.complete(answer_to(2))
    queue.answers.give_up()
    assert (short.ended, long.ended) == (False, True)
    assert long.give_up is None
    short.complete(answer_to(1))
    assert queue.sent() == [1, 2]


def test_what_is_dropped_is_refused_and_never_sent() -> None:
    queue = Queue()
    answer = queue.deferred()
    answer.give_up = lambda: answer.complete(answer_to(1))
    queue.answers.append_packets(answer_to(2).encode())
    queue.answers.drop()
    assert answer.ended
    assert (len(queue.answers.waiting), queue.answers.waiting_bytes) == (0, 0)
    assert queue.sent() == []
    assert queue.calls == 0
