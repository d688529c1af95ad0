"""How two tables of documents differ."""

import hypothesis.strategies as st
import pyarrow as pa
from hypothesis import given

from upriver.model.comparison import Difference, differences

Held = dict[bytes, bytes]
held = st.dictionaries(st.binary(max_size=2), st.binary(max_size=1), max_size=8)


def table(documents: Held, order: list[bytes]) -> pa.Table:
    keys = sorted(documents, key=order.index) if order else list(documents)
    values = [documents[key] for key in keys]
    vbuckets = pa.array([3] * len(keys), pa.uint16())
    return pa.table({"vbucket": vbuckets, "key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())})


@given(held, held, st.randoms(use_true_random=False))
def test_missing_extra_different(first: Held, second: Held, chance: object) -> None:
    expected = {Difference(3, "missing", key) for key in first.keys() - second.keys()}
    expected |= {Difference(3, "extra", key) for key in second.keys() - first.keys()}
    both = first.keys() & second.keys()
    expected |= {Difference(3, "different", key, ("value",)) for key in both if first[key] != second[key]}
    found = list(differences(table(first, []), table(second, sorted(second, reverse=True))))
    assert set(found) == expected
    assert len(found) == len(expected)


def test_keys_of_several_vbuckets_are_told_apart() -> None:
    first = pa.table({"_vbucket": [1, 2], "_key": [b"a", b"a"], "flags": [0, 0]})
    second = pa.table({"_vbucket": [2, 1], "_key": [b"a", b"a"], "flags": [7, 0]})
    assert list(differences(first, second, "_vbucket", "_key")) == [Difference(2, "different", b"a", ("flags",))]
