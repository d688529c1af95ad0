"""Cluster maps of nodes that move vbuckets."""

from typing import Any

import pytest

from upriver.client.cluster.map_updates import joined, place_of, revision
from upriver.client.transport.address import Endpoint
from upriver.errors import ClusterMapError

A, B, C = (Endpoint(host, 1) for host in "abc")


def config(servers: str, owners: list[int], epoch: int = 1, rev: int = 1) -> dict[str, Any]:
    rows = [[owner] for owner in owners]
    servers_map = {"serverList": [f"{host}:1" for host in servers], "vBucketMap": rows}
    return {"rev": rev, "revEpoch": epoch, "name": "default", "nodesExt": [], "vBucketServerMap": servers_map}


def owners(config: dict[str, Any]) -> list[int]:
    return [row[0] for row in config["vBucketServerMap"]["vBucketMap"]]


def test_nodes_that_were_alone_are_joined() -> None:
    found = joined(config("a", [0, 0, -1, -1]), config("b", [-1, -1, 0, -1], rev=2), A, B)
    assert found["vBucketServerMap"]["serverList"] == ["b:1", "a:1"]
    assert owners(found) == [1, 1, 0, -1]
    assert revision(found) == (1, 2)
    assert found["nodesExt"] == [{"hostname": "a", "services": {"kv": 1}}]


def test_a_pushed_map_wins_over_what_nodes_made_up() -> None:
    found = joined(config("ac", [0, 1, 1], epoch=2), config("b", [0, 0, 0], rev=99), A, B)
    assert found["vBucketServerMap"]["serverList"] == ["a:1", "c:1", "b:1"]
    assert owners(found) == [0, 1, 1]
    assert place_of(found, B) == 2
    assert place_of(found, Endpoint("::1", 1)) is None


def test_an_older_pushed_map_says_nothing() -> None:
    found = joined(config("ab", [-1, 0], epoch=2, rev=5), config("ab", [1, 1], epoch=2, rev=4), A, B)
    assert owners(found) == [-1, 0]


@pytest.mark.parametrize(
    ("epochs", "uuid"), [((1, 1), "source"), ((2, 1), "source"), ((1, 2), "destination"), ((2, 2), "destination")]
)
def test_a_bucket_keeps_its_uuid_when_it_moves_to_a_second_node(epochs: tuple[int, int], uuid: str) -> None:
    source = config("a", [0, 0], epoch=epochs[0]) | {"uuid": "source"}
    destination = config("b", [-1, -1], epoch=epochs[1], rev=2) | {"uuid": "destination"}
    assert joined(source, destination, A, B)["uuid"] == uuid


def test_nodes_with_different_numbers_of_vbuckets_are_not_joined() -> None:
    for first, second in ((2, 4), (4, 2)):
        with pytest.raises(ClusterMapError, match=f"{first} vbuckets and .* {second}"):
            joined(config("a", [0] * first), config("b", [-1] * second, rev=2), A, B)
