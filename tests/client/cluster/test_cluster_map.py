"""The map that nodes return."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.client.cluster.cluster_map import ClusterMap
from upriver.client.transport.address import Endpoint
from upriver.errors import ClusterMapError, NoSuchVbucket
from upriver.model import vbucket_of


def config(**changes: Any) -> bytes:
    servers = {"serverList": ["$HOST:11210", "b:11211"], "vBucketMap": [[0, 1], [1], [-1], [0]]}
    whole: dict[str, Any] = {"rev": 3, "revEpoch": 2, "name": "default", "vBucketServerMap": servers}
    return json.dumps(whole | changes).encode()


def test_the_owner_of_each_vbucket() -> None:
    found = ClusterMap.parse(config(), "here")
    here, there = Endpoint("here", 11210), Endpoint("b", 11211)
    assert [found.owner(vbucket) for vbucket in range(4)] == [here, there, None, here]
    assert found.owned() == {here: [0, 3], there: [1]}
    assert found.revision == (2, 3)
    assert found.vbuckets == 4
    assert found.vbucket_of(b"key") == vbucket_of(b"key", 4)
    with pytest.raises(NoSuchVbucket, match="vbucket 4 does not exist; the bucket has vbuckets 0 to 3"):
        found.owner(4)


def test_epoch_before_revision() -> None:
    maps = [ClusterMap.parse(config(revEpoch=epoch, rev=rev), "h") for epoch, rev in ((1, 9), (2, 1), (2, 2))]
    assert maps[1].newer_than(maps[0])
    assert maps[2].newer_than(maps[1])
    assert not maps[0].newer_than(maps[2])
    assert not maps[0].newer_than(maps[0])
    assert maps[0].newer_than(None)


def test_tls_ports() -> None:
    nodes = [{"services": {"kv": 11210, "kvSSL": 11207}}, {"hostname": "b", "services": {"kv": 11211}}]
    found = ClusterMap.parse(config(nodesExt=nodes), "here", tls=True)
    assert found.endpoints == (Endpoint("here", 11207), Endpoint("b", 11211))


@pytest.mark.parametrize(
    "encoded",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b"{}",
        b"[" * 100_000,
        config(rev="x"),
        config(vBucketServerMap={}),
        config(vBucketServerMap={"serverList": ["a:1"], "vBucketMap": [[1]]}),
        config(vBucketServerMap={"serverList": ["a:1"], "vBucketMap": [[]]}),
        config(vBucketServerMap={"serverList": ["a"], "vBucketMap": [[0]]}),
        config(vBucketServerMap={"serverList": ["a:1"], "vBucketMap": []}),
        config(vBucketServerMap={"serverList": ["a:1"], "vBucketMap": [[0]] * 1025}),
        config(rev=float("inf")),
    ],
)
def test_what_makes_no_sense(encoded: bytes) -> None:
    with pytest.raises(ClusterMapError):
        ClusterMap.parse(encoded, "h")


def nested(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)


@given(st.recursive(st.none() | st.integers() | st.text(), nested, max_leaves=5))
def test_any_json_is_refused_or_taken(value: object) -> None:
    servers = {"serverList": value}
    for whole in (value, {"rev": value, "vBucketServerMap": value}, {"rev": 1, "vBucketServerMap": servers}):
        with pytest.raises(ClusterMapError):
            ClusterMap.parse(json.dumps(whole).encode(), "h")
