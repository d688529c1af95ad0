"""Buckets and the cluster map: what clients ask for when they start."""

from upriver.errors import KeyNotFound
from upriver.node.auth.users import Role
from upriver.node.commands.registry import ANY_USER, command, success
from upriver.node.session import Answer, Session
from upriver.wire.dialects.memcached import GetClusterConfig, ListBuckets, SelectBucket, SetClusterConfig


@command(ListBuckets, role=ANY_USER)
def list_buckets(session: Session, request: ListBuckets) -> Answer:
    """The one bucket that the node serves."""
    return success(request, names=session.node.bucket_name.encode())


@command(SelectBucket, role=ANY_USER)
def select_bucket(session: Session, request: SelectBucket) -> Answer:
    """Take the node's own bucket; there is no other."""
    if request.name.decode(errors="replace") != session.node.bucket_name:
        raise KeyNotFound(f"this node serves the bucket {session.node.bucket_name} alone")
    session.selected = True
    return success(request)


@command(GetClusterConfig, role=ANY_USER)
def get_cluster_config(session: Session, request: GetClusterConfig) -> Answer:
    """The map, unless the client has it already."""
    cluster = session.node.cluster
    known = (request.rev_epoch or 0, request.rev or 0)
    if request.rev is not None and cluster.revision <= known:
        return success(request)
    return success(request, config=cluster.encoded())


@command(SetClusterConfig, role=Role.ADMIN)
def set_cluster_config(session: Session, request: SetClusterConfig) -> Answer:
    """Take a newer map from whoever runs the cluster."""
    session.node.cluster.push(request.config)
    return success(request)
