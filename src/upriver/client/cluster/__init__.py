"""Which node owns which vbucket: the cluster map, its updates, and queries to single nodes."""

from upriver.client.cluster.cluster import Cluster
from upriver.client.cluster.node_queries import (
    VbucketStatus,
    active_vbuckets,
    failover_logs,
    owners,
    statistics,
    vbuckets_of,
)
from upriver.client.cluster.single_node import SingleNode

__all__ = [
    "Cluster",
    "SingleNode",
    "VbucketStatus",
    "active_vbuckets",
    "failover_logs",
    "owners",
    "statistics",
    "vbuckets_of",
]
