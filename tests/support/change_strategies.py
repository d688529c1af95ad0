"""Hypothesis strategies for the vocabulary."""

from hypothesis import strategies as st

from upriver.model import Change, Event

U8 = st.integers(0, 2**8 - 1)
U16 = st.integers(0, 2**16 - 1)
U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)


def changes() -> st.SearchStrategy[Change]:
    """Any row of a batch."""
    return st.builds(
        Change,
        vbucket=U16,
        event=st.sampled_from(Event),
        seqno=U64,
        rev_seqno=U64,
        cas=U64,
        flags=U32,
        expiry=U32,
        lock_time=U32,
        datatype=U8,
        key=st.binary(max_size=40),
        value=st.binary(max_size=60),
    )


def key_changes() -> st.SearchStrategy[Change]:
    """Changes of a key with all that their kind can say, and nothing that it cannot."""
    common = {
        "vbucket": U16,
        "seqno": U64,
        "rev_seqno": U64,
        "cas": U64,
        "datatype": U8,
        "key": st.binary(max_size=40),
        "value": st.binary(max_size=60),
    }
    return st.one_of(
        st.builds(Change, event=st.just(Event.MUTATION), flags=U32, expiry=U32, lock_time=U32, **common),
        st.builds(Change, event=st.just(Event.DELETION), **common),
        st.builds(Change, event=st.just(Event.EXPIRATION), expiry=U32, **common),
    )


EVENTS = (Event.MUTATION, Event.DELETION, Event.EXPIRATION)
CHANGES = st.builds(
    Change,
    vbucket=st.integers(0, 1023),
    event=st.sampled_from(EVENTS),
    seqno=st.integers(1, 2**64 - 1),
    rev_seqno=st.integers(1, 2**64 - 1),
    cas=st.integers(0, 2**64 - 1),
    expiry=st.integers(0, 2**32 - 1),
    key=st.binary(min_size=1, max_size=20),
    value=st.binary(max_size=40),
)
