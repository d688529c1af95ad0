"""TAP on a node: names, registration, refusals, the consumer's answers, users."""

import logging

import pytest

from tests.support.in_memory_node import InMemoryNode, Peer
from tests.support.tap_peer import (
    ACK,
    BACKFILL,
    CHECKPOINT,
    DUMP,
    LIST,
    REGISTERED,
    TAKEOVER,
    TapPeer,
    brief,
    connect,
    keys,
    state_of,
    succeed_until,
)
from upriver.model import Change, Event, FailoverEntry, FailoverLog, VbucketState
from upriver.node.auth.users import Role, User
from upriver.node.auth.users_file import Users
from upriver.node.options import ListenAddress
from upriver.protocol.tap.connect_plan import TapSettings
from upriver.wire import AnyResponse, Message, Response, dcp, memcached, tap
from upriver.wire.codes import Status
from upriver.wire.dialects.tap import ConnectFlag, Control, TapFlag


@pytest.fixture
def node() -> InMemoryNode:
    made = InMemoryNode(tap_settings=TapSettings(ack_interval=2, keep_alive_s=100))
    made.bucket.create_vbucket(1)
    return made


def client(node: InMemoryNode, flags: int = BACKFILL | ACK, name: bytes = b"client", date: int = 0) -> TapPeer[Peer]:
    return TapPeer(node, connect(name, flags | LIST, date, (1,)))


# Connect


@pytest.mark.parametrize(
    "packet",
    [
        tap.Connect(name=b"n").encode() + b"rest",
        tap.Connect(name=b"n", flags=ConnectFlag(1), backfill_date=0).encode()[:-3],
        tap.Connect(name=b"n", flags=ConnectFlag(4), vbuckets=(1, 2, 3)).encode()[:-2],
    ],
    ids=["a value without a flag", "half a date", "half a list"],
)
def test_a_value_that_does_not_fit_its_flags_is_refused_and_closed(node: InMemoryNode, packet: bytes) -> None:
    body = len(packet) - 24
    packet = packet[:8] + body.to_bytes(4, "big") + packet[12:]
    peer = node.connect()
    (answer,) = peer.send(packet)
    assert isinstance(answer, Response)
    assert answer.status is Status.EINVAL
    assert peer.closed


@pytest.mark.parametrize("closed_only", [None, 0, 1])
def test_the_connect_of_a_backup_tool_is_served(node: InMemoryNode, closed_only: int | None) -> None:
    node.write(1, b"a")
    flags = ConnectFlag(BACKFILL | ACK | CHECKPOINT | REGISTERED)
    peer = TapPeer(node, tap.Connect(name=b"backup", flags=flags, backfill_date=0, closed_only=closed_only))
    told = brief(peer.run())
    assert told.index("a=v") < told.index("#open_checkpoint")
    assert not peer.closed


@pytest.mark.parametrize(
    "request_",
    [
        connect(b"n", LIST | DUMP, vbuckets=(1,) * 1000),
        connect(b"n", CHECKPOINT, checkpoints=(tap.VbucketCheckpoint(vbucket=1, checkpoint=1),) * 1000),
    ],
    ids=["vbuckets", "checkpoints"],
)
def test_a_list_that_is_longer_than_everything_there_is_is_refused(node: InMemoryNode, request_: tap.Connect) -> None:
    peer = node.connect()
    (answer,) = peer.send(request_)
    assert isinstance(answer, AnyResponse)
    assert answer.status is Status.EINVAL
    assert "a connect of at most 1309 bytes" in answer.text
    assert peer.closed


def test_a_vbucket_beyond_the_bucket_is_refused(node: InMemoryNode) -> None:
    everything = TapPeer(node, connect(b"all", LIST | DUMP | ACK, vbuckets=tuple(range(64))))
    everything.run()
    assert brief(everything.received)[-1] == "#close_tap_stream"
    peer = TapPeer(node, connect(b"more", LIST | DUMP | ACK, vbuckets=(1, 64)))
    assert brief(peer.run()) == ["not_my_vbucket"]
    assert peer.closed


def test_what_a_dump_leaves_out_is_one_line(node: InMemoryNode, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        TapPeer(node, connect(b"n", LIST | DUMP, vbuckets=tuple(range(30)))).run()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("TAP client n: vbuckets 0, 2, 3, ")
    assert line.endswith(", 20 and 9 more are not sent: no data on this node")


def test_a_client_that_registers_without_a_name_is_known_by_a_generated_one(node: InMemoryNode) -> None:
    peer = TapPeer(node, connect(b"", REGISTERED | ACK))
    peer.run()
    peer.leave()
    node.pass_by(1000)
    node.write(1, b"meanwhile")
    again = TapPeer(node, connect(b"anon_1", REGISTERED | ACK))
    assert keys(again.run()) == ["meanwhile"]
    (answer,) = node.connect().send(memcached.DeregisterTapClient(name=b"anon_1"))
    assert isinstance(answer, Response)
    assert answer.status is Status.SUCCESS


def test_a_takeover_without_a_name_is_continued_by_no_other_connection(node: InMemoryNode) -> None:
    node.write(1, b"a")
    request = connect(b"", TAKEOVER | LIST, vbuckets=(1,))
    unread = TapPeer(node, request)
    node.settle()
    unread.leave()
    assert node.bucket.vbucket(1).state is VbucketState.DEAD
    for again in (request, connect(b"anon_1", TAKEOVER | LIST, vbuckets=(1,))):
        assert brief(TapPeer(node, again).run()) == ["not_my_vbucket"]


def test_extras_may_be_left_out(node: InMemoryNode) -> None:
    plain = tap.Connect(name=b"n").encode()
    without = plain[:4] + b"\0" + plain[5:8] + (1).to_bytes(4, "big") + plain[12:24] + b"n"
    peer = node.connect()
    assert brief(peer.send(without)) == ["#initial_vbucket_stream", "#close_backfill"]
    node.write(1, b"a")
    node.settle()
    assert brief(peer.take()) == ["a=v"]


def test_a_second_connect_on_the_same_connection_is_refused(node: InMemoryNode) -> None:
    peer = client(node)
    peer.run()
    (answer,) = peer.peer.send(connect(b"other"))
    assert isinstance(answer, Response)
    assert answer.status is Status.KEY_EEXISTS
    assert peer.closed


def test_other_requests_are_answered_beside_the_stream(node: InMemoryNode) -> None:
    peer = client(node)
    peer.run()
    answers = peer.peer.send(memcached.Noop(opaque=5))
    assert [(answer.code, answer.opaque) for answer in answers] == [(0x0A, 5)]  # type: ignore[attr-defined]
    assert not peer.closed


@pytest.mark.parametrize(("dialect", "served"), [("tap", True), ("dcp", False), ("upr_draft3", False)])
def test_a_listener_that_is_pinned_to_another_dialect_serves_no_tap(
    node: InMemoryNode, dialect: str, served: bool
) -> None:
    node.write(1, b"a")
    peer = node.connect(listen_address=ListenAddress(dialect=dialect))
    answers = peer.send(connect(b"n", DUMP))
    if served:
        assert "a=v" in brief(answers)
    else:
        assert brief(answers) == ["einval"]
    change = tap.Mutation(vbucket=1, key=b"k", cas=1, rev_seqno=1, nru=0, tap_flags=TapFlag.ACK)
    sender = node.connect(listen_address=ListenAddress(dialect=dialect))
    assert brief(sender.send(change)) == ["success" if served else "einval"]


# Names


def test_an_open_under_a_similar_name_takes_nothing_away(node: InMemoryNode) -> None:
    node.write(1, b"a")
    other = node.connect("other").open(b"tap:client")
    assert len(other.send(dcp.StreamRequest(vbucket=1, end_seqno=2**64 - 1))) == 3
    assert "a=v" in brief(client(node).run())


@pytest.mark.parametrize("request_", [connect(b"y" * 65_530, REGISTERED), dcp.Open(name=b"y" * 65_530)])
def test_a_name_that_no_statistic_could_tell_is_refused(node: InMemoryNode, request_: Message) -> None:
    client(node).run()
    (answer,) = node.connect().send(request_)
    assert isinstance(answer, Response)
    assert answer.status is Status.EINVAL
    for group in (b"tap", b"dcp"):
        answers = node.connect().send(memcached.Stat(key=group))
        assert isinstance(answers[-1], memcached.StatResponse)
        assert not answers[-1].key


def test_names_that_are_no_text_are_told_from_those_that_look_like_them(node: InMemoryNode) -> None:
    peers = [client(node, ACK | REGISTERED, name) for name in (b"\xff", rb"\xff", rb"\\xff")]
    for peer in peers:
        peer.run()
    assert [peer.closed for peer in peers] == [False] * 3
    assert brief(node.connect().send(memcached.DeregisterTapClient(name=b"\xff"))) == ["success"]
    assert [peer.closed for peer in peers] == [True, False, False]


def test_a_name_that_was_made_up_belongs_to_its_client(node: InMemoryNode) -> None:
    nameless = client(node, name=b"")
    nameless.run()
    named = client(node, name=b"anon_1")
    assert brief(named.run()) == ["key_eexists"]
    assert (nameless.closed, named.closed) == (False, True)
    nameless.leave()
    named = client(node, name=b"anon_1")
    named.run()
    named.leave()
    assert node.tap.clients.get("anon_1") is not None


def test_a_name_that_connects_again_takes_the_place_of_the_old_connection(node: InMemoryNode) -> None:
    node.write(1, b"a")
    old = client(node)
    old.run()
    new = client(node)
    new.run()
    assert (old.closed, new.closed) == (True, False)
    assert len(list(node.tap)) == 1
    node.write(1, b"b")
    assert brief(new.run()) == ["b=v"]


def test_within_its_keep_alive_a_client_gets_what_it_had_not_acknowledged(node: InMemoryNode) -> None:
    node.write(1, b"a", b"b", b"c", b"d")
    first = client(node)

    answered: list[Message] = []

    def until_b(message: Message) -> Status | None:  # one answer covers all before it, so none comes after b
        answered.append(message)
        return None if any(getattr(each, "key", b"") > b"b" for each in answered) else Status.SUCCESS

    first.judge = until_b
    first.run()
    first.leave()
    node.write(1, b"e")
    node.pass_by(50)
    second = client(node)
    messages = second.run()
    assert keys(messages) == ["c", "d", "e"]
    assert "#initial_vbucket_stream" not in brief(messages)
    assert {**state_of(first.received), **state_of(messages)} == dict.fromkeys((b"a", b"b", b"c", b"d", b"e"), b"v")


def test_what_was_refused_for_the_moment_was_not_acknowledged(node: InMemoryNode) -> None:
    node.write(1, b"a", b"b", b"c", b"d")
    first = client(node)
    first.judge = lambda m: Status.ETMPFAIL if getattr(m, "key", b"") == b"b" else Status.SUCCESS
    first.run()
    first.leave()
    assert "b" in keys(client(node).run())


def test_without_acknowledgements_nothing_counts_as_received(node: InMemoryNode) -> None:
    node.write(1, b"a", b"b")
    first = client(node, BACKFILL)
    assert len(keys(first.run())) == 2
    first.leave()
    assert brief(client(node, BACKFILL).run()) == ["#initial_vbucket_stream", "a=v", "b=v", "#close_backfill"]


def test_after_its_keep_alive_a_client_starts_over(node: InMemoryNode) -> None:
    node.write(1, b"a")
    first = client(node)
    first.run()
    first.leave()
    node.pass_by(101)
    assert keys(client(node).run()) == ["a"]


def test_a_client_of_future_changes_misses_nothing_between_two_connections(node: InMemoryNode) -> None:
    node.write(1, b"old")
    first = client(node, ACK)
    first.run()
    node.write(1, b"a")
    first.run()
    first.leave()
    node.write(1, b"b")
    assert keys(client(node, ACK).run()) == ["b"]


@pytest.mark.parametrize(
    ("flags", "since", "comes"),
    [
        (ACK, None, ["c", "d"]),
        (ACK, 0, ["c", "d"]),
        (ACK, 1, ["c", "d"]),
        (ACK | REGISTERED, 0, ["c", "d"]),
        (0, 0, ["d"]),
        (0, 1, ["d"]),
    ],
    ids=["everything", "now", "by a clock that is fast", "registered", "without answers", "without, by a fast clock"],
)
def test_a_later_date_leaves_out_nothing_that_was_not_acknowledged(
    node: InMemoryNode, flags: int, since: int | None, comes: list[str]
) -> None:
    """A client that asks for future changes each time that it connects misses nothing."""
    node.write(1, b"old")
    node.pass_by(10)
    begun = int(node.clock())
    first = client(node, BACKFILL | flags, date=0 if since is None else begun + since)
    first.judge = succeed_until("c")
    for key in (b"a", b"b", b"c"):
        node.write(1, key)
        first.run()
    for _ in range(2):  # also if it goes again without having read anything
        first.leave()
        node.pass_by(10)
        first = client(node, BACKFILL | flags, date=int(node.clock()))
    node.write(1, b"d")
    assert keys(first.run()) == comes


def test_a_history_that_broke_meanwhile_means_everything_again(node: InMemoryNode) -> None:
    node.write(1, b"a")
    first = client(node)
    first.run()
    first.leave()
    node.bucket.flush()
    node.write(1, b"x", b"y")
    messages = client(node).run()
    assert "#initial_vbucket_stream" in brief(messages)
    assert state_of(messages) == {b"x": b"v", b"y": b"v"}


@pytest.mark.parametrize("flags", [BACKFILL | ACK, BACKFILL], ids=["acknowledged", "without answers"])
def test_a_client_that_starts_over_learns_that_the_history_broke_too(node: InMemoryNode, flags: int) -> None:
    node.pass_by(10)
    now = int(node.clock())
    first = client(node, flags, date=now)
    node.write(1, b"a")
    first.run()
    first.leave()
    node.bucket.flush()
    node.write(1, b"x")
    messages = client(node, flags, date=now - 5).run()
    assert state_of(first.received + messages) == {b"x": b"v"}


def test_a_client_that_stopped_in_mid_snapshot_is_not_taken_for_whole(node: InMemoryNode) -> None:
    """It holds k@2 of a snapshot whose k@1 was left out; a history that ends before k@2 has k@1 again."""
    replica = node.bucket.create_vbucket(2, VbucketState.REPLICA)
    for _ in range(2):
        replica.receive(Event.MUTATION, b"k", b"v")
    replica.receive(Event.MUTATION, b"l", b"v")
    request = connect(b"client", BACKFILL | ACK | LIST, vbuckets=(2,))
    first = TapPeer(node, request)
    first.judge = lambda m: None if getattr(m, "key", b"") == b"l" else Status.SUCCESS
    first.run()
    first.leave()
    replica.roll_back(1)
    again = TapPeer(node, request).run()
    assert state_of(again) == {b"k": b"v"}
    assert "#initial_vbucket_stream" in brief(again)


def test_anonymous_clients_are_not_remembered(node: InMemoryNode) -> None:
    peer = client(node, name=b"")
    peer.run()
    assert [each.name for each in node.tap.clients] == ["anon_1"]
    peer.leave()
    assert len(node.tap.clients) == 0


# Registration


@pytest.mark.shows("tap:registered-stays")
def test_a_registered_client_is_remembered_until_it_is_deregistered(node: InMemoryNode) -> None:
    node.write(1, b"a")
    first = client(node, BACKFILL | ACK | REGISTERED)
    first.run()
    first.leave()
    assert node.bucket.vbucket(1).cursors == {}  # it pins nothing
    node.write(1, b"b")
    node.pass_by(10_000)
    assert keys(client(node, BACKFILL | ACK).run()) == ["b"]
    ask = node.connect()
    (answer,) = ask.send(memcached.DeregisterTapClient(name=b"client"))
    assert isinstance(answer, Response)
    assert answer.status is Status.SUCCESS
    (answer,) = ask.send(memcached.DeregisterTapClient(name=b"client"))
    assert isinstance(answer, Response)
    assert answer.status is Status.KEY_ENOENT


@pytest.mark.parametrize("flags", [DUMP | ACK | REGISTERED, DUMP | REGISTERED, DUMP | ACK])
def test_a_dump_is_everything_each_time(node: InMemoryNode, flags: int) -> None:
    node.write(1, b"a", b"b", b"c", b"d")
    for _ in range(2):
        peer = client(node, flags)
        assert keys(peer.run()) == ["a", "b", "c", "d"]
        assert peer.closed


def test_a_dump_that_was_interrupted_goes_on_and_who_follows_a_finished_one_too(node: InMemoryNode) -> None:
    node.write(1, b"a", b"b", b"c", b"d")
    first = client(node, DUMP | ACK | REGISTERED)
    first.judge = succeed_until("c")
    first.run()
    first.leave()
    assert keys(client(node, DUMP | ACK | REGISTERED).run()) == ["c", "d"]
    node.write(1, b"e")
    assert keys(client(node, BACKFILL | ACK | REGISTERED).run()) == ["e"]


@pytest.mark.shows("open_issues:stop-streams")
def test_a_connected_client_that_is_deregistered_is_told_and_closed(node: InMemoryNode) -> None:
    peer = client(node, BACKFILL | ACK | REGISTERED)
    peer.run()
    ask = node.connect()
    assert brief(ask.send(memcached.DeregisterTapClient(name=b"client"))) == ["success"]
    assert brief(peer.run()) == ["#close_tap_stream"]
    assert peer.closed
    assert brief(ask.send(memcached.DeregisterTapClient(name=b"client"))) == ["key_enoent"]
    node.write(1, b"a")
    assert keys(client(node).run()) == ["a"]


def test_a_busy_client_that_is_deregistered_gets_nothing_behind_the_goodbye() -> None:
    node = InMemoryNode(tap_settings=TapSettings(ack_interval=2, window_messages_max=10))
    node.bucket.create_vbucket(1)
    node.write(1, *(b"k%d" % i for i in range(100)))
    peer = client(node, BACKFILL | ACK | REGISTERED)
    peer.judge = lambda _: None
    last = peer.run()[-1]
    answer = AnyResponse(opcode=0x41, opaque=last.opaque)  # type: ignore[attr-defined]
    peer.peer.put(answer.encode() + memcached.DeregisterTapClient(name=b"client").encode())
    assert brief(peer.run()) == ["#close_tap_stream", "success"]
    assert peer.closed


@pytest.mark.shows("tap:registered-memory")
def test_a_registered_client_survives_a_purge_by_starting_over(node: InMemoryNode) -> None:
    vbucket = node.bucket.vbucket(1)
    node.write(1, b"a", b"b")
    first = client(node, BACKFILL | ACK | REGISTERED)
    first.run()
    first.leave()
    vbucket.delete(b"a")
    vbucket.table.purge_seqno = 3  # the tombstone is gone
    messages = client(node, BACKFILL | ACK).run()
    assert "#initial_vbucket_stream" in brief(messages)
    assert state_of(messages) == {b"b": b"v"}


def test_what_was_sent_and_not_acknowledged_counts_where_the_history_goes_back(node: InMemoryNode) -> None:
    replica = node.bucket.create_vbucket(2, VbucketState.REPLICA)
    replica.replace_failover_log(FailoverLog((FailoverEntry(77, 0),)))
    for seqno, key in ((1, b"a"), (2, b"b"), (3, b"lost")):
        replica.begin_snapshot(seqno - 1, seqno)
        replica.apply(Change(vbucket=2, event=Event.MUTATION, seqno=seqno, key=key, value=b"v"))
    request = connect(b"client", BACKFILL | ACK | LIST, 0, (2,))
    first = TapPeer(node, request)
    first.judge = succeed_until("lost")
    first.run()
    first.leave()
    assert "lost" in keys(first.received)
    replica.roll_back(2)  # the acknowledged place is still there, and something that the client holds is not
    messages = TapPeer(node, request).run()
    assert "#initial_vbucket_stream" in brief(messages)
    assert state_of(first.received + messages) == {b"a": b"v", b"b": b"v"}


def test_a_purge_beyond_the_acknowledged_place_counts_even_if_more_was_sent(node: InMemoryNode) -> None:
    vbucket = node.bucket.vbucket(1)
    node.write(1, b"a", b"b")
    first = client(node)
    first.run()
    first.judge = lambda _: None
    node.write(1, b"c")
    first.run()
    vbucket.delete(b"a")
    node.write(1, b"d")
    first.run()
    first.leave()  # it was sent the deletion, and may have lost it
    vbucket.table.purge_seqno = 4
    messages = client(node).run()
    assert "#initial_vbucket_stream" in brief(messages)


# The consumer


def test_answers_come_when_asked_for_or_on_error(node: InMemoryNode) -> None:
    node.bucket.create_vbucket(2, VbucketState.REPLICA)
    peer = node.connect()
    assert peer.send(tap.Mutation(vbucket=2, key=b"k", value=b"v", rev_seqno=7, nru=0, cas=9, opaque=1)) == []
    (answer,) = peer.send(tap.Delete(vbucket=2, key=b"l", rev_seqno=7, cas=9, opaque=2, tap_flags=TapFlag.ACK))
    assert isinstance(answer, Response)
    assert (answer.status, answer.opaque) == (Status.SUCCESS, 2)
    (answer,) = peer.send(tap.Mutation(vbucket=60, key=b"k", rev_seqno=1, nru=0, opaque=3))
    assert isinstance(answer, Response)
    assert (answer.status, answer.opaque) == (Status.NOT_MY_VBUCKET, 3)
    (answer,) = peer.send(tap.Mutation(vbucket=2, key=b"k", rev_seqno=1, nru=0, ttl=0))
    assert isinstance(answer, Response)
    assert answer.status is Status.EINVAL
    assert not peer.closed
    item = node.bucket.vbucket(2).table.find(b"k")
    assert item is not None
    assert (item.value, item.cas, item.rev_seqno) == (b"v", 9, 7)


def test_a_state_is_answered_when_it_is_on_disk(node: InMemoryNode) -> None:
    node.disk_works = False
    peer = node.connect()
    peer.send(tap.Mutation(vbucket=1, key=b"k", value=b"v", rev_seqno=7, nru=0, cas=9))
    request = tap.SetVbucket(vbucket=2, state=memcached.VbucketState.PENDING, tap_flags=TapFlag.ACK)
    assert peer.send(request) == []
    node.disk_works = True
    node.settle()
    (answer,) = peer.take()
    assert isinstance(answer, Response)
    assert answer.status is Status.SUCCESS
    assert node.bucket.vbucket(1).persisted_seqno == 1


def test_a_message_that_cannot_be_read_is_answered(node: InMemoryNode) -> None:
    peer = node.connect()
    packet = tap.Opaque(control=Control.CLOSE_BACKFILL).encode()
    broken = packet[:8] + (9).to_bytes(4, "big") + packet[12:33]
    (answer,) = peer.send(broken)
    assert isinstance(answer, Response)
    assert answer.status is Status.EINVAL
    assert not peer.closed


def test_tap_messages_and_opened_streams_do_not_mix(node: InMemoryNode) -> None:
    peer = node.connect().open()
    peer.send(tap.Opaque(control=Control.ENABLE_AUTO_NACK))
    assert peer.closed
    other = client(node)
    other.run()
    answers = other.peer.send(dcp.Open(name=b"x", flags=dcp.OpenFlag.PRODUCER))
    assert [answer.status for answer in answers] == [Status.UNKNOWN_COMMAND]  # type: ignore[attr-defined]


@pytest.mark.shows("tap:opaque-either")
def test_both_sides_may_ask_for_an_online_update(node: InMemoryNode, caplog: pytest.LogCaptureFixture) -> None:
    sender, receiver = node.connect(), client(node, DUMP | ACK)
    receiver.judge = lambda _: None
    receiver.run()
    with caplog.at_level(logging.WARNING):
        (answer,) = sender.send(tap.Opaque(control=Control.START_ONLINEUPDATE, tap_flags=TapFlag.ACK))
        assert isinstance(answer, Response)
        assert answer.status is Status.SUCCESS
        assert node.tap.online_update.running
        receiver.peer.send(tap.Opaque(control=Control.REVERT_ONLINEUPDATE))
    assert not node.tap.online_update.running
    assert "tests" in caplog.text


# Users


@pytest.mark.shows("tap:internal")
def test_roles(node: InMemoryNode) -> None:
    node.state.users = Users()

    def status(roles: Role, request: Message) -> Status | None:
        peer = node.connect()
        peer.session.user = User("somebody", roles, {})
        answers = peer.send(request)
        return answers[0].status if answers and isinstance(answers[0], Response) else None

    denied, change = Status.EACCESS, tap.Mutation(vbucket=1, key=b"k", rev_seqno=1, nru=0, cas=1, tap_flags=TapFlag.ACK)
    flush = tap.Flush(tap_flags=TapFlag.ACK)
    update = tap.Opaque(control=Control.START_ONLINEUPDATE, tap_flags=TapFlag.ACK)
    assert status(Role.READ, connect(b"n")) is denied
    assert status(Role.STREAM, connect(b"n")) is None
    assert status(Role.STREAM, change) is denied
    assert status(Role.WRITE, change) is Status.SUCCESS
    assert status(Role.WRITE, flush) is denied
    assert status(Role.ADMIN, flush) is Status.SUCCESS
    assert status(Role.WRITE, update) is denied
    replica = node.bucket.create_vbucket(2, VbucketState.REPLICA)
    replica.receive(Event.MUTATION, b"k", b"v")
    begin = tap.Opaque(control=Control.INITIAL_VBUCKET_STREAM, vbucket=2, tap_flags=TapFlag.ACK)
    assert status(Role.WRITE, begin) is denied
    assert replica.high_seqno
    assert status(Role.ADMIN, begin) is Status.SUCCESS
    assert not replica.high_seqno
    takeover = connect(b"mover", TAKEOVER | LIST, vbuckets=(1,))
    assert status(Role.STREAM, takeover) is denied
    assert node.bucket.vbucket(1).state is VbucketState.ACTIVE
    assert status(Role.STREAM | Role.ADMIN, takeover) is None
    assert node.bucket.vbucket(1).state is VbucketState.DEAD


@pytest.mark.parametrize(
    ("roles", "wanted"), [(Role.STREAM, Status.EACCESS), (Role.STREAM | Role.ADMIN, Status.SUCCESS)]
)
def test_a_takeover_by_streams_needs_the_role_admin_too(node: InMemoryNode, roles: Role, wanted: Status) -> None:
    node.state.users = Users()
    peer = node.connect()
    peer.session.user = User("somebody", roles, {})
    answer = peer.open(b"mover").send(dcp.StreamRequest(vbucket=1, flags=dcp.StreamFlag.TAKEOVER, opaque=3))[0]
    assert isinstance(answer, Response)
    assert answer.status is wanted


def test_a_client_named_like_an_anonymous_one_is_not_taken_for_it(node: InMemoryNode) -> None:
    named = TapPeer(node, connect(b"anon_3", BACKFILL | ACK))
    named.run()
    nameless = [TapPeer(node, connect(b"", BACKFILL)) for _ in range(8)]
    for peer in nameless:
        peer.run()
    assert not any(peer.closed for peer in [named, *nameless])
    named.leave()
    assert node.tap.clients.get("anon_3") is not None
    for peer in nameless:
        peer.leave()
    assert len(node.tap.clients) == 1
