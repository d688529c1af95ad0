"""Which node owns which vbucket: the cluster map, its updates, and queries to single nodes."""

from upriver.client.cluster.cluster import Cluster
from upriver.client.cluster.newest_copies import NewestCopies
from upriver.client.cluster.node_queries import (
    VbucketStatus,
    VisibleEnd,
    active_seqnos,
    active_vbuckets,
    failover_logs,
    item_counts,
    owners,
    statistics,
    vbuckets_of,
    visible_ends,
)
from upriver.client.cluster.single_node import SingleNode

__all__ = [
    "Cluster",
    "NewestCopies",
    "SingleNode",
    "VbucketStatus",
    "VisibleEnd",
    "active_seqnos",
    "active_vbuckets",
    "failover_logs",
    "item_counts",
    "owners",
    "statistics",
    "vbuckets_of",
    "visible_ends",
]
