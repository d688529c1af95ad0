"""The cluster map: which node owns which vbucket, in the JSON that clients read.

A node that never received a map makes its own, with itself as the only node. Clients keep the newest map that they have
seen, so revisions must never go back. The node's own maps have epoch 1 and count from its start time in milliseconds;
maps that are pushed to a node must have epoch 2 or later. A pushed map stays until a newer one comes, with a data
directory also after a restart.
"""

import json
import reprlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from upriver.errors import InvalidArguments, KeyExists, StorageError
from upriver.files import storage_errors, write_atomically

#: Stands for the host name; each client replaces it with the address that it connected to.
HOST: Final = "$HOST"
#: Clients store revisions in 63 bits.
REVISION_MAX: Final = 2**63 - 1
REPLICAS_MAX: Final = 3


def single_node(
    *,
    bucket: str,
    uuid: str,
    kv_port: int,
    mgmt_port: int,
    vbuckets: int,
    active: Iterable[int],
    rev: int = 1,
    tls: bool = False,
) -> dict[str, Any]:
    """Return the map of a single node. Clients that use TLS look for services under separate names."""
    owned = set(active)
    services = {"kv": kv_port, "mgmt": mgmt_port}
    if tls:
        services |= {"kvSSL": kv_port, "mgmtSSL": mgmt_port}
    return {
        "rev": rev,
        "revEpoch": 1,
        "name": bucket,
        "uuid": uuid,
        "nodeLocator": "vbucket",
        "bucketCapabilitiesVer": "",
        "bucketCapabilities": ["dcp", "cccp", "nodesExt"],
        "nodes": [{"hostname": f"{HOST}:{mgmt_port}", "ports": {"direct": kv_port}}],
        "nodesExt": [{"services": services, "thisNode": True}],
        "vBucketServerMap": {
            "hashAlgorithm": "CRC",
            "numReplicas": 0,
            "serverList": [f"{HOST}:{kv_port}"],
            "vBucketMap": [[0 if number in owned else -1] for number in range(vbuckets)],
        },
    }


class NodeClusterMap:
    """The newest cluster map that this node knows; ``path`` is the file for a pushed map."""

    def __init__(self, config: dict[str, Any], path: Path | None = None) -> None:
        self._config = config
        self._pushed = False
        self._path = path
        self._encoded: bytes | None = None
        #: Returns the active vbuckets, if they may differ from those in the map.
        self._active: Callable[[], Iterable[int]] | None = None

    @classmethod
    def load(cls, made_up: dict[str, Any], path: Path) -> "NodeClusterMap":
        """Return the map that was pushed before the restart, else the node's own; ``StorageError`` if it is invalid."""
        cluster = cls(made_up, path)
        try:
            kept = path.read_bytes()
        except FileNotFoundError:
            return cluster
        except OSError as error:
            raise StorageError(str(path), error.strerror or str(error)) from None
        try:
            cluster._take(parsed(kept, cluster.bucket, cluster.vbuckets))
        except InvalidArguments as error:
            raise StorageError(str(path), f"{error.detail}; remove the file to start with the node's own map") from None
        return cluster

    @property
    def bucket(self) -> str:
        """The name of the bucket."""
        return str(self._config["name"])

    @property
    def vbuckets(self) -> int:
        """The number of vbuckets."""
        return len(self._config["vBucketServerMap"]["vBucketMap"])

    @property
    def revision(self) -> tuple[int, int]:
        """Epoch and revision; larger is newer."""
        self._follow()
        return int(self._config.get("revEpoch", 0)), int(self._config["rev"])

    def encoded(self) -> bytes:
        """Return the map as JSON."""
        self._follow()
        if self._encoded is None:  # cached: every not-my-vbucket response contains it
            self._encoded = json.dumps(self._config, separators=(",", ":")).encode()
        return self._encoded

    def push(self, encoded: bytes) -> None:
        """Take a pushed map if it is newer."""
        config = parsed(encoded, self.bucket, self.vbuckets)
        revision = int(config.get("revEpoch", 0)), int(config["rev"])
        if revision < self.revision or (revision == self.revision and config != self._config):
            raise KeyExists(f"epoch and revision {revision} are not newer than {self.revision}")
        if self._path is not None:
            with storage_errors(self._path):
                write_atomically(self._path, encoded)
        self._take(config)

    def _take(self, config: dict[str, Any]) -> None:
        self._config, self._pushed, self._encoded = config, True, None

    def own_vbuckets_changed(self, active: Callable[[], Iterable[int]]) -> None:
        """The node's vbuckets changed: the node's own map is updated on its next use."""
        if not self._pushed:
            self._active = active

    def _follow(self) -> None:
        if self._active is None:
            return
        servers, owned = self._config["vBucketServerMap"], set(self._active())
        self._active = None
        rows = [[0 if number in owned else -1] for number in range(len(servers["vBucketMap"]))]
        if rows != servers["vBucketMap"]:
            servers["vBucketMap"] = rows
            self._config["rev"] += 1
            self._encoded = None


def parsed(encoded: bytes, bucket: str, vbuckets: int) -> dict[str, Any]:
    """Parse a pushed map and check what clients rely on; unknown fields are kept."""
    try:
        config = json.loads(encoded)
    except (ValueError, RecursionError) as error:
        raise InvalidArguments(f"the cluster map is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise InvalidArguments(f"the cluster map must be a JSON object, not {_shown(config)}")
    if "rev" not in config:
        raise InvalidArguments("the cluster map has no revision: add rev, a number from 0")
    for name in ("rev", "revEpoch"):
        revision = config.get(name, 0)
        if type(revision) is not int or not 0 <= revision <= REVISION_MAX:
            raise InvalidArguments(f"{name} = {_shown(revision)}: it must be a whole number from 0, less than 2**63")
    if config.get("name") != bucket:
        raise InvalidArguments(f"the cluster map is for bucket {config.get('name')!r}, but this node has {bucket!r}")
    _check_servers(config.get("vBucketServerMap"), vbuckets)
    _check_nodes(config.get("nodesExt"))
    return config


def _check_servers(servers: Any, vbuckets: int) -> None:
    if not isinstance(servers, dict):
        raise InvalidArguments(f"vBucketServerMap = {_shown(servers)}: it must be a JSON object")
    if servers.get("hashAlgorithm", "CRC") != "CRC":
        raise InvalidArguments(f"hashAlgorithm = {_shown(servers['hashAlgorithm'])}: it must be CRC")
    replicas = servers.get("numReplicas", REPLICAS_MAX)
    if type(replicas) is not int or not 0 <= replicas <= REPLICAS_MAX:
        raise InvalidArguments(f"numReplicas = {_shown(replicas)}: it must be 0 to {REPLICAS_MAX}")
    hosts, rows = servers.get("serverList"), servers.get("vBucketMap")
    if not isinstance(hosts, list) or not hosts or not all(isinstance(each, str) and ":" in each for each in hosts):
        raise InvalidArguments(f"serverList = {_shown(hosts)}: it must be a list of HOST:PORT")
    if not isinstance(rows, list):
        raise InvalidArguments(f"vBucketMap = {_shown(rows)}: it must be a list with a row for each vbucket")
    if len(rows) != vbuckets:
        raise InvalidArguments(f"vBucketMap has {len(rows)} rows, but the bucket has {vbuckets} vbuckets")
    for number, row in enumerate(rows):
        if not isinstance(row, list) or not row or len(row) > 1 + replicas:
            raise InvalidArguments(
                f"row {number} of the vBucketMap = {_shown(row)}: it must have an active server and at most"
                f" {replicas} replicas"
            )
        if not all(type(place) is int and -1 <= place < len(hosts) for place in row):
            raise InvalidArguments(
                f"row {number} of the vBucketMap = {_shown(row)}: a server is not in the serverList; use 0 to"
                f" {len(hosts) - 1}, or -1 for none"
            )


def _check_nodes(nodes: Any) -> None:
    """Check that each node in the list, if there is one, has services with ports."""
    if nodes is None:
        return
    if not isinstance(nodes, list) or not all(isinstance(node, dict) for node in nodes):
        raise InvalidArguments(f"nodesExt = {_shown(nodes)}: it must be a list of nodes")
    for number, node in enumerate(nodes):
        services = node.get("services")
        if not isinstance(services, dict) or not all(type(port) is int for port in services.values()):
            raise InvalidArguments(
                f"services of node {number} in nodesExt = {_shown(services)}: it must be an object of ports"
            )


def _shown(value: Any) -> str:
    """A value of the map as an error shows it: a wrong map may be large."""
    return reprlib.repr(value)
