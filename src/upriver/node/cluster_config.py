"""The cluster map: which node holds which vbucket, in the terse JSON that clients read.

A node that was given no map makes one up in which it is alone and holds what its bucket holds. A map that somebody
pushed stands until a newer revision comes.
"""

import json
from collections.abc import Iterable
from typing import Any

from upriver.errors import InvalidArguments, KeyExists

#: The place of the host name that each client fills in with the address it connected to.
HOST = "$HOST"


def single_node(
    *, bucket: str, uuid: str, kv_port: int, mgmt_port: int, vbuckets: int, active: Iterable[int], rev: int = 1
) -> dict[str, Any]:
    """The map of a cluster of one."""
    owned = set(active)
    return {
        "rev": rev,
        "revEpoch": 1,
        "name": bucket,
        "uuid": uuid,
        "nodeLocator": "vbucket",
        "bucketCapabilitiesVer": "",
        "bucketCapabilities": ["dcp", "cccp", "nodesExt"],
        "nodes": [{"hostname": f"{HOST}:{mgmt_port}", "ports": {"direct": kv_port}}],
        "nodesExt": [{"services": {"kv": kv_port, "mgmt": mgmt_port}, "thisNode": True}],
        "vBucketServerMap": {
            "hashAlgorithm": "CRC",
            "numReplicas": 0,
            "serverList": [f"{HOST}:{kv_port}"],
            "vBucketMap": [[0 if number in owned else -1] for number in range(vbuckets)],
        },
    }


class ClusterConfig:
    """The newest cluster map that this node knows."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._pushed = False

    @property
    def revision(self) -> tuple[int, int]:
        """Epoch and revision; larger is newer."""
        return int(self._config.get("revEpoch", 0)), int(self._config["rev"])

    def encoded(self) -> bytes:
        """The map as clients read it."""
        return json.dumps(self._config, separators=(",", ":")).encode()

    def push(self, encoded: bytes) -> None:
        """Take a map from outside, if it is newer."""
        config = parsed(encoded)
        revision = int(config.get("revEpoch", 0)), int(config["rev"])
        if self._pushed and revision < self.revision:
            raise KeyExists(f"revision {revision} is older than {self.revision}")
        self._config, self._pushed = config, True

    def own_vbuckets_changed(self, active: Iterable[int]) -> None:
        """The node's vbuckets changed: a map that the node made itself follows."""
        if self._pushed:
            return
        servers = self._config["vBucketServerMap"]
        owned = set(active)
        servers["vBucketMap"] = [[0 if number in owned else -1] for number in range(len(servers["vBucketMap"]))]
        self._config["rev"] += 1


def parsed(encoded: bytes) -> dict[str, Any]:
    """A map from outside, checked as far as a node must understand it."""
    try:
        config = json.loads(encoded)
    except (ValueError, RecursionError) as error:
        raise InvalidArguments(f"the cluster map is not JSON: {error}") from None
    if not isinstance(config, dict) or "rev" not in config:
        raise InvalidArguments("the cluster map has no revision")
    if any(type(config.get(name, 0)) is not int for name in ("rev", "revEpoch")):
        raise InvalidArguments("the revision of the cluster map is no number")
    return config
