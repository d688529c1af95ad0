"""The cluster map that clients read."""

import json
from pathlib import Path
from typing import Any

import pytest

from upriver.errors import InvalidArguments, KeyExists, StorageError
from upriver.node.cluster_map import NodeClusterMap, parsed, single_node


def alone(vbuckets: int = 4) -> NodeClusterMap:
    return NodeClusterMap(
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
    config.own_vbuckets_changed(lambda: [1])
    assert config.revision == (1, 2)
    assert json.loads(config.encoded())["vBucketServerMap"]["vBucketMap"] == [[-1], [0], [-1], [-1]]
    config.own_vbuckets_changed(lambda: [1])  # another role of one that is not active
    assert config.revision == (1, 2)


def pushed(rev: int = 7, epoch: int = 2, **changes: Any) -> bytes:
    servers = {
        "hashAlgorithm": "CRC",
        "numReplicas": 1,
        "serverList": ["a:1", "b:2"],
        "vBucketMap": [[0, 1], [1, 0], [0, -1], [-1]],
        **changes.pop("servers", {}),
    }
    return json.dumps({"rev": rev, "revEpoch": epoch, "name": "beer", "vBucketServerMap": servers, **changes}).encode()


def test_a_pushed_map_stands_until_a_newer_one_comes() -> None:
    config = alone()
    config.push(pushed(mine=True))
    config.own_vbuckets_changed(lambda: [1])
    assert json.loads(config.encoded()) == json.loads(pushed(mine=True))
    config.push(pushed(mine=True))  # the same map once more is accepted
    for older in (pushed(99, 1), pushed(6), pushed(mine=False)):
        with pytest.raises(KeyExists, match="not newer"):
            config.push(older)
    config.push(pushed(1, 3))
    assert config.revision == (3, 1)


def test_the_first_that_is_pushed_must_be_newer_too() -> None:
    """Clients have seen the map that the node made up, and would not take it."""
    config = alone()
    config.own_vbuckets_changed(lambda: [1])
    with pytest.raises(KeyExists):
        config.push(pushed(1, 1))
    assert config.revision == (1, 2)
    config.push(pushed(3, 1))
    assert config.revision == (1, 3)


def test_what_was_pushed_is_there_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    made_up = json.loads(alone().encoded())
    first = NodeClusterMap.load(made_up, path)
    assert first.revision == (1, 1)
    first.push(pushed())
    second = NodeClusterMap.load(made_up | {"rev": 10**12}, path)
    assert second.encoded() == first.encoded()
    with pytest.raises(KeyExists):
        second.push(pushed(6))
    second.own_vbuckets_changed(lambda: [1])
    assert second.revision == (2, 7)


@pytest.mark.parametrize("content", [b"{", b"{}", pushed(name="other")])
def test_a_file_that_is_no_map_says_so(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "cluster.json"
    path.write_bytes(content)
    with pytest.raises(StorageError, match="remove the file"):
        NodeClusterMap.load(json.loads(alone().encoded()), path)


def test_a_map_that_cannot_be_kept_is_not_taken(tmp_path: Path) -> None:
    config = NodeClusterMap.load(json.loads(alone().encoded()), tmp_path / "gone" / "cluster.json")
    with pytest.raises(StorageError):
        config.push(pushed())
    assert config.revision == (1, 1)


@pytest.mark.parametrize("encoded", [b"", b"{", b"\xff", b"[]", b"7", b"{}", b'{"rev": "1"}', b'{"rev": null}'])
def test_a_map_without_sense(encoded: bytes) -> None:
    with pytest.raises(InvalidArguments):
        parsed(encoded, "beer", 4)


@pytest.mark.parametrize(
    ("encoded", "why"),
    [
        (b"[]", r"must be a JSON object, not \[\]"),
        (b"{}", "no revision: add rev"),
        (b'{"rev": true}', "rev = True: it must be a whole number from 0"),
        (b'{"rev": 1, "revEpoch": "x"}', "revEpoch = 'x': it must be a whole number"),
        (b'{"rev": 1, "revEpoch": null}', "revEpoch = None: it must be a whole number"),
        (pushed(-1), "rev = -1: it must be a whole number"),
        (pushed(2**63), r"rev = 9223372036854775808: .* less than 2\*\*63"),
        (pushed(name="wine"), "'wine'"),
        (pushed(vBucketServerMap=None), "vBucketServerMap = None: it must be a JSON object"),
        (pushed(servers={"hashAlgorithm": "MD5"}), "hashAlgorithm = 'MD5': it must be CRC"),
        (pushed(servers={"numReplicas": True}), "numReplicas = True: it must be 0 to"),
        (pushed(servers={"serverList": []}), r"serverList = \[\]: it must be a list of HOST:PORT"),
        (pushed(servers={"serverList": ["a"]}), r"serverList = \['a'\]: it must be a list of HOST:PORT"),
        (pushed(servers={"vBucketMap": 7}), "vBucketMap = 7: it must be a list with a row for each vbucket"),
        (pushed(servers={"vBucketMap": [[0]]}), "vBucketMap has 1 rows, but the bucket has 4 vbuckets"),
        (
            pushed(servers={"vBucketMap": [[0], [1], [2], [0]]}),
            r"row 2 .* = \[2\]: a server is not in the serverList; use 0 to 1",
        ),
        (pushed(servers={"vBucketMap": [[0], [1], [], [0]]}), "row 2"),
        (pushed(servers={"vBucketMap": [[0], [1], [0, 1, 1], [0]]}), "row 2 .* at most 1 replicas"),
        (pushed(nodesExt=[7]), r"nodesExt = \[7\]: it must be a list of nodes"),
        (
            pushed(nodesExt=[{"services": {"kv": "x"}}]),
            "node 0 in nodesExt = {'kv': 'x'}: it must be an object of ports",
        ),
    ],
)
def test_a_map_that_clients_could_not_follow(encoded: bytes, why: str) -> None:
    config = alone()
    with pytest.raises(InvalidArguments, match=why):
        config.push(encoded)
    assert config.revision == (1, 1)
