"""Windows of both sides."""

from hypothesis import given
from hypothesis import strategies as st

from upriver.protocol.flow_control import ACK_SHARE, ReceiveWindow, SendWindow


def test_without_a_size_there_is_no_limit_and_nothing_is_counted() -> None:
    window = SendWindow()
    assert window.room_bytes is None
    window.sent(1000)
    assert (window.unacked_bytes, window.room_bytes) == (0, None)


def test_the_last_packet_may_exceed_the_window() -> None:
    window = SendWindow()
    window.resize(1)
    assert window.room_bytes == 1
    window.sent(44)
    assert (window.room_bytes, window.unacked_bytes) == (0, 44)
    window.acked(43)
    assert window.room_bytes == 0
    window.acked(1)
    assert window.room_bytes == 1


def test_an_acknowledgement_of_more_than_is_open_is_worth_just_that() -> None:
    window = SendWindow()
    window.resize(100)
    window.sent(30)
    window.acked(1000)
    assert (window.unacked_bytes, window.acked_bytes_total, window.room_bytes) == (0, 30, 100)


def test_a_window_that_is_closed_again_limits_no_longer() -> None:
    window = SendWindow()
    window.resize(10)
    window.sent(10)
    window.resize(0)
    assert window.room_bytes is None


def test_what_was_on_its_way_when_a_window_was_lifted_does_not_count_in_the_next() -> None:
    window = SendWindow()
    for size in (10, 0, 5):
        window.resize(size)
        window.sent(3)
    assert (window.unacked_bytes, window.room_bytes) == (3, 2)
    window.resize(4)
    assert window.room_bytes == 1


def test_a_consumer_acknowledges_a_share_of_its_window() -> None:
    window = ReceiveWindow(100)
    share = int(100 * ACK_SHARE)
    assert window.processed(share - 1) == 0
    assert window.processed(1) == share
    assert window.processed(5) == 0
    assert window.flush() == 5
    assert (window.flush(), window.acked_bytes_total) == (0, share + 5)


def test_without_a_window_nothing_is_acknowledged() -> None:
    assert ReceiveWindow().processed(10_000) == 0


@given(size=st.integers(1, 5000), packets=st.lists(st.integers(24, 3000), max_size=60))
def test_the_two_windows_never_block_each_other_for_good(size: int, packets: list[int]) -> None:
    sender, receiver = SendWindow(), ReceiveWindow(size)
    sender.size_bytes = size
    for packet in packets:
        assert sender.room_bytes, "the receiver owes an acknowledgement"
        sender.sent(packet)
        sender.acked(receiver.processed(packet))
    assert sender.acked_bytes_total == receiver.acked_bytes_total
    assert sender.acked_bytes_total + sender.unacked_bytes == sum(packets)
