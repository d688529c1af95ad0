"""Replication in a real Spark: one way, both ways, with other names, and through crashes of the source."""

from collections.abc import Iterator

import pyarrow as pa
import pytest

pytest.importorskip("pyspark", reason="the spark extra is not installed")


from upriver.errors import OptionError
from upriver.node import EmbeddedNode, start
from upriver.pipelines.replicate import ReplicateOptions, renamed


@pytest.fixture
def target() -> Iterator[EmbeddedNode]:
    """The node that gets the changes."""
    with start(vbuckets=4) as node:
        yield node


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({}, "name the cluster that gets the changes"),
        ({"to": "a:1"}, "cannot be copied onto itself"),
        ({"to": "a:1", "rename": "x=xy"}, "cannot be copied onto itself"),
        ({"to": "b:1", "rename": "x"}, "it must be OLD=NEW"),
        ({"to": "b:1", "rename": "x=y", "key_prefix": "z"}, "only keys that begin with 'x'"),
        ({"to": "b:1", "rename": "x=y", "key_filter": "z"}, "cannot be combined with rename"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, str], complaint: str) -> None:
    with pytest.raises(OptionError, match=complaint):
        ReplicateOptions.read({"from": "a:1", **given})


def test_the_way_back_undoes_the_names() -> None:
    options = ReplicateOptions.read({"from": "a:1", "to": "b:2", "rename": "user:=c:", "key_prefix": "user:x"})
    back = options.reversed()
    assert (str(back.source), str(back.to), back.rename, back.prefix) == ("b:2", "a:1", ("c:", "user:"), "c:x")
    assert back.reversed() == options
    batch = pa.record_batch({"n": pa.array([1]), "key": pa.array([b"user:x7"])})
    assert renamed(renamed(batch, options.rename), back.rename) == batch
    assert renamed(batch, options.rename).column("key").to_pylist() == [b"c:x7"]
