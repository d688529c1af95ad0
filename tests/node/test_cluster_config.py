"""The cluster map that clients read."""

import json

import pytest

from upriver.errors import InvalidArguments, KeyExists
from upriver.node.cluster_config import ClusterConfig, parsed, single_node


def alone(vbuckets: int = 4) -> ClusterConfig:
    return ClusterConfig(
        single_node(bucket="beer", uuid="ab", kv_port=11210, mgmt_port=8091, vbuckets=vbuckets, active=[0, 2])
    )


def test_a_cluster_of_one() -> None:
    config = json.loads(alone().encoded())
    assert config["rev"] == 1
    assert config["revEpoch"] == 1
    assert (config["name"], config["uuid"], config["nodeLocator"]) == ("beer", "ab", "vbucket")
    assert {"dcp", "cccp", "nodesExt"} <= set(config["bucketCapabilities"])
    assert config["nodesExt"] == [{"services": {"kv": 11210, "mgmt": 8091}, "thisNode": True}]
    assert config["nodes"] == [{"hostname": "$HOST:8091", "ports": {"direct": 11210}}]
    assert config["vBucketServerMap"] == {
        "hashAlgorithm": "CRC",
        "numReplicas": 0,
        "serverList": ["$HOST:11210"],
        "vBucketMap": [[0], [-1], [0], [-1]],
    }


def test_it_follows_the_vbuckets_of_the_node() -> None:
    config = alone()
    config.own_vbuckets_changed([1])
    assert json.loads(config.encoded())["vBucketServerMap"]["vBucketMap"] == [[-1], [0], [-1], [-1]]
    assert config.revision == (1, 2)


def test_a_pushed_map_stands_until_a_newer_one_comes() -> None:
    config = alone()
    config.push(b'{"rev": 7, "revEpoch": 2, "mine": true}')
    config.own_vbuckets_changed([1])
    assert json.loads(config.encoded()) == {"rev": 7, "revEpoch": 2, "mine": True}
    with pytest.raises(KeyExists, match="older"):
        config.push(b'{"rev": 99, "revEpoch": 1}')
    with pytest.raises(KeyExists):
        config.push(b'{"rev": 6, "revEpoch": 2}')
    config.push(b'{"rev": 1, "revEpoch": 3}')
    assert config.revision == (3, 1)


@pytest.mark.parametrize("encoded", [b"", b"{", b"\xff", b"[]", b"7", b"{}", b'{"rev": "1"}', b'{"rev": null}'])
def test_a_map_without_sense(encoded: bytes) -> None:
    with pytest.raises(InvalidArguments):
        parsed(encoded)


@pytest.mark.parametrize("encoded", [b'{"rev": true}', b'{"rev": 1, "revEpoch": "x"}', b'{"rev": 1, "revEpoch": null}'])
def test_a_map_whose_revision_is_no_number(encoded: bytes) -> None:
    with pytest.raises(InvalidArguments, match="revision"):
        alone().push(encoded)
