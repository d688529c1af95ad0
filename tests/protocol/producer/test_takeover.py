"""What the source of a takeover has done, and knows, at each step."""

import pytest

from tests.support.fake_node import FakeNode
from upriver.errors import NotMyVbucket
from upriver.model import VbucketState
from upriver.protocol.producer.takeover import SourceTakeover


def test_the_source_is_dead_first_and_knows_when_that_is_on_disk() -> None:
    node = FakeNode()
    node.create_vbucket(3)
    node.write(3, b"k")
    source = node.source
    source_vbucket = source.vbucket(3)
    assert source_vbucket is not None
    called: list[bool] = []
    takeover = SourceTakeover(source, source_vbucket, "successor", lambda: called.append(takeover.durable))
    assert (takeover.dead, takeover.durable) == (False, False)

    node.disk_works = False
    takeover.make_dead()
    node.settle()
    assert node.vbucket(3).state is VbucketState.DEAD
    assert (takeover.dead, takeover.durable, called) == (True, False, [])

    node.disk_works = True
    node.settle()
    assert called == [True]
    assert node.vbucket(3).successor == "successor"
    assert node.vbucket(3).persisted_seqno == 1


def test_writers_are_waited_for_while_each_round_leaves_less_than_half_of_the_last() -> None:
    node = FakeNode()
    vbucket = node.create_vbucket(3)
    takeover = SourceTakeover(node.source, vbucket, "successor", lambda: None)
    sent = 0
    for written in (9000, 4000, 1900):
        node.write(3, *(b"%d" % number for number in range(written)))
        assert not takeover.is_near(sent)
        assert not takeover.is_near(vbucket.high_seqno - 1), "the round is not over"
        sent = vbucket.high_seqno
    node.write(3, *(b"%d" % number for number in range(1800)))
    assert takeover.is_near(sent)


def test_what_is_there_at_the_beginning_is_sent_first_however_little_it_is() -> None:
    node = FakeNode()
    vbucket = node.create_vbucket(3)
    node.write(3, b"a", b"b")
    takeover = SourceTakeover(node.source, vbucket, "successor", lambda: None)
    assert not takeover.is_near(1)
    assert takeover.is_near(2)
    node.write(3, *(b"%d" % number for number in range(1000)))
    assert takeover.is_near(2)


def test_a_copy_that_is_dead_already_gets_one_successor_and_no_other() -> None:
    node = FakeNode()
    vbucket = node.create_vbucket(3)
    vbucket.set_state(VbucketState.DEAD)
    source = node.source
    first, second = (SourceTakeover(source, vbucket, name, lambda: None) for name in ("first", "second"))
    node.disk_works = False
    first.make_dead()
    node.settle()
    assert (vbucket.successor, first.durable) == ("first", False), "it is not on disk yet"
    with pytest.raises(NotMyVbucket, match="handed over to 'first'"):
        second.make_dead()
    assert (vbucket.successor, second.dead) == ("first", False)
    node.disk_works = True
    node.settle()
    assert first.durable


def test_what_the_successor_has_is_not_handed_over_again() -> None:
    node = FakeNode()
    vbucket = node.create_vbucket(3)
    source = node.source
    first, second = (SourceTakeover(source, vbucket, name, lambda: None) for name in ("first", "second"))
    first.make_dead()
    node.settle()
    second.confirm_takeover()
    assert vbucket.may_hand_over_to("first"), "that another is active has nothing to do with it"
    node.disk_works = False
    first.confirm_takeover()
    node.settle()
    assert not first.over, "it is not on disk yet"
    node.disk_works = True
    node.settle()
    assert first.over
    with pytest.raises(NotMyVbucket, match="handed over to 'first'"):
        SourceTakeover(source, vbucket, "first", lambda: None).make_dead()


def test_a_copy_that_is_gone_needs_no_record_of_its_successor() -> None:
    node = FakeNode()
    vbucket = node.create_vbucket(3)
    takeover = SourceTakeover(node.source, vbucket, "successor", lambda: None)
    takeover.make_dead()
    node.delete_vbucket(3)
    takeover.confirm_takeover()
    node.settle()
    assert takeover.over
