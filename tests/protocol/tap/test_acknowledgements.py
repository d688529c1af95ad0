"""Numbers, answers, and what is kept in between."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.protocol.tap.acknowledgements import AckWindow, Piece, key_of, messages_in
from upriver.wire import Request, tap
from upriver.wire.dialects.tap import Control


def piece(window: AckWindow, *messages: Request) -> Piece:
    first = window.take_numbers(len(messages))
    for place, message in enumerate(messages):
        message.opaque = first + place
    made = Piece(first, len(messages), b"".join(message.encode() for message in messages))
    window.sent(made)
    return made


def mutation(key: bytes, vbucket: int = 1) -> tap.Mutation:
    return tap.Mutation(vbucket=vbucket, key=key, value=b"v", rev_seqno=1, nru=0)


def test_one_answer_covers_all_before_it_by_whole_pieces() -> None:
    window = AckWindow(100, 10**6)
    one, two, three = (piece(window, mutation(b"a"), mutation(b"b")) for _ in range(3))
    assert window.messages == 6
    assert window.covered(3) == [one]
    assert window.piece_of(3) is two
    assert window.covered(6) == [two, three]
    assert (window.messages, window.bytes, window.covered(9), window.piece_of(6)) == (0, 0, [], None)


def test_the_window_is_bounded_in_messages_and_bytes() -> None:
    window = AckWindow(3, 10**6)
    piece(window, mutation(b"a"), mutation(b"b"))
    assert window.room == 1
    piece(window, mutation(b"c"))
    assert (window.room, window.times_full) == (0, 1)
    window.covered(2)
    assert window.room == 2
    narrow = AckWindow(1000, 60)
    piece(narrow, mutation(b"a"), mutation(b"b"))
    assert narrow.room == 0


@given(passed=st.integers(1, 2**33), sent=st.integers(1, 20), which=st.integers(0, 19), noise=st.integers(0, 2**32 - 1))
def test_an_opaque_means_the_one_message_that_is_awaited(passed: int, sent: int, which: int, noise: int) -> None:
    window = AckWindow(100, 10**6)
    window.next_number = passed
    for _ in range(sent):
        window.sent(Piece(window.take_numbers(1), 1, b""))
    number = passed + which % sent
    assert window.number_of(number % 2**32) == number
    found = window.number_of(noise)
    assert found is None or (passed <= found < passed + sent and found % 2**32 == noise)
    assert AckWindow(1, 1).number_of(noise) is None


def test_a_message_is_found_again() -> None:
    window = AckWindow(100, 10**6)
    sent = piece(window, mutation(b"a"), mutation(b"b"))
    assert [key_of(sent.message(number)) for number in (2, 1)] == [(1, b"b"), (1, b"a")]
    for number in (0, 3):
        with pytest.raises(LookupError):
            sent.message(number)


@given(
    st.lists(st.lists(st.sampled_from([b"a", b"b", b"c"]), min_size=1, max_size=3), max_size=12),
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 40)), max_size=6),
)
def test_what_is_newer_is_known_whenever_one_asks(batches: list[list[bytes]], answers: list[tuple[int, int]]) -> None:
    window, sent = AckWindow(1000, 10**6), []
    for turn, batch in enumerate(batches):
        sent.append(piece(window, *map(mutation, batch)))
        for when, number in answers:
            if when == turn:
                window.covered(number)
        kept = [each for each in sent if each.last >= window.oldest]
        numbered = [(p.first + n, key_of(m)) for p in kept for n, m in enumerate(messages_in(p.data))]
        for number, key in numbered if turn % 2 else ():
            assert key is not None
            assert window.sent_since(number, key) == any(n > number and k == key for n, k in numbered)


def test_a_newer_change_of_the_same_key_is_found_behind_it() -> None:
    window = AckWindow(100, 10**6)
    piece(window, mutation(b"k"), mutation(b"l"))
    piece(window, tap.Opaque(control=Control.CLOSE_BACKFILL))
    piece(window, mutation(b"l"))
    assert window.sent_since(2, (1, b"l"))
    assert not window.sent_since(4, (1, b"l"))
    assert not window.sent_since(1, (1, b"k"))
    assert not window.sent_since(1, (2, b"l"))


def test_keys_are_read_from_changes_only() -> None:
    deletion = tap.Delete(vbucket=5, key=b"key", rev_seqno=9).encode()
    control = tap.Opaque(vbucket=5, control=Control.CLOSE_BACKFILL).encode()
    assert key_of(deletion) == (5, b"key")
    assert key_of(control) is None
    assert list(messages_in(deletion + control)) == [deletion, control]
