"""Commands for buckets and the cluster map, which clients send first."""

from upriver.errors import KeyNotFound
from upriver.node.auth.users import Role
from upriver.node.commands.registry import ANY_USER, command, success
from upriver.node.session import Answer, Session
from upriver.wire.dialects.memcached import GetClusterConfig, ListBuckets, SelectBucket, SetClusterConfig


@command(ListBuckets, role=ANY_USER)
def list_buckets(session: Session, request: ListBuckets) -> Answer:
    """Return the name of the node's only bucket."""
    return success(request, names=session.node.bucket_name.encode())


@command(SelectBucket, role=ANY_USER)
def select_bucket(session: Session, request: SelectBucket) -> Answer:
    """Select the node's only bucket."""
    if request.name.decode(errors="replace") != session.node.bucket_name:
        raise KeyNotFound(f"this node has only the bucket {session.node.bucket_name!r}")
    session.selected = True
    return success(request)


@command(GetClusterConfig, role=ANY_USER)
def get_cluster_config(session: Session, request: GetClusterConfig) -> Answer:
    """Return the cluster map, unless the client already has it."""
    cluster = session.node.cluster
    known = (request.rev_epoch or 0, request.rev or 0)
    if request.rev is not None and cluster.revision <= known:
        return success(request)
    return success(request, config=cluster.encoded())


@command(SetClusterConfig, role=Role.ADMIN)
def set_cluster_config(session: Session, request: SetClusterConfig) -> Answer:
    """Take a newer cluster map from an administrator."""
    session.node.cluster.push(request.config)
    return success(request)
