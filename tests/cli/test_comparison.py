"""What two sets of documents hold differently."""

import hypothesis.strategies as st
import pyarrow as pa
from hypothesis import given

from upriver.cli.comparison import Difference, differences

Held = dict[bytes, bytes]
held = st.dictionaries(st.binary(max_size=2), st.binary(max_size=1), max_size=8)


def table(documents: Held, order: list[bytes]) -> pa.Table:
    keys = sorted(documents, key=order.index) if order else list(documents)
    values = [documents[key] for key in keys]
    return pa.table({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())})


@given(held, held, st.randoms(use_true_random=False))
def test_missing_extra_different(first: Held, second: Held, chance: object) -> None:
    expected = {Difference(3, "missing", key) for key in first.keys() - second.keys()}
    expected |= {Difference(3, "extra", key) for key in second.keys() - first.keys()}
    expected |= {Difference(3, "different", key) for key in first.keys() & second.keys() if first[key] != second[key]}
    found = list(differences(3, table(first, []), table(second, sorted(second, reverse=True))))
    assert set(found) == expected
    assert len(found) == len(expected)
