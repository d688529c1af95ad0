"""Clients that others wrote."""

import importlib.util
import shutil
import subprocess
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme

from upriver.node.auth.users import Role, User
from upriver.node.auth.users_file import Users
from upriver.node.embedded import EmbeddedNode, start

pytestmark = pytest.mark.interop

MEMCCAPABLE = shutil.which("memccapable") or shutil.which("memcapable")


def package(name: str) -> pytest.MarkDecorator:
    """Skip what needs a package that is not there."""
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"the package {name} is not installed")


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with one user who may read and write, and one who may only read."""
    path = tmp_path_factory.mktemp("users") / "users.json"
    with Users.edit(path, create=True) as edited:
        edited.add(User.create("alice", "secret", Role.READ | Role.WRITE))
        edited.add(User.create("bob", "hidden", Role.READ))
        edited.add(User.create("root", "almighty", Role.ADMIN))
    return path


@pytest.fixture(scope="module")
def guarded(users: Path) -> Iterator[EmbeddedNode]:
    """A node that wants to know who one is."""
    with start(users=str(users)) as node:
        yield node


# memccapable, from libmemcached's tools


@pytest.mark.skipif(MEMCCAPABLE is None, reason="memccapable (libmemcached-tools) is not installed")
@pytest.mark.parametrize("ack", ["memory", "disk"])
def test_memccapable(ack: str) -> None:
    assert MEMCCAPABLE is not None
    with start(vbuckets=1, ack=ack) as node:
        command = [MEMCCAPABLE, "-b", "-h", node.host, "-p", str(node.port), "-t", "10"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    report = [line for line in done.stdout.splitlines() if line.strip()]
    assert done.returncode == 0, done.stdout
    assert report[-1] == "All tests passed"
    assert sum("[pass]" in line for line in report) == 27


# python-binary-memcached


@pytest.fixture
def binary(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Makes clients of the package, and closes them."""
    import bmemcached

    made: list[Any] = []

    def make(node: EmbeddedNode, **options: Any) -> Any:
        made.append(bmemcached.Client((node.address,), socket_timeout=10, **options))
        return made[-1]

    yield make
    for client in made:
        client.disconnect_all()


def exercise_binary(client: Any) -> None:
    assert client.set("text", "value")
    assert client.get("text") == "value"
    assert client.set("object", {"a": [1, 2]})
    assert client.get("object") == {"a": [1, 2]}
    assert client.get("none") is None
    assert client.add("text", "again") is False
    assert client.replace("text", "other")
    assert client.replace("none", "other") is False
    value, cas = client.gets("text")
    assert (value, client.cas("text", "swapped", cas), client.cas("text", "late", cas)) == ("other", True, False)
    assert client.incr("number", 5, default=10) == 10
    assert client.incr("number", 5) == 15
    assert client.decr("number", 100) == 0
    assert not client.set_multi({f"many{n}": n for n in range(100)})
    assert client.get_multi([f"many{n}" for n in range(100)]) == {f"many{n}": n for n in range(100)}
    assert client.delete("text")
    assert client.get("text") is None
    assert client.delete_multi([f"many{n}" for n in range(100)])
    assert client.set("brief", "v", time=4_000_000_000)
    assert client.set("compressed", "x" * 10_000, compress_level=6)
    assert client.get("compressed") == "x" * 10_000
    (stats,) = client.stats().values()
    assert "curr_items" in {getattr(key, "decode", lambda key=key: key)() for key in stats}


@package("bmemcached")
@pytest.mark.parametrize("ack", ["memory", "disk"])
def test_binary_memcached(binary: Callable[..., Any], ack: str) -> None:
    with start(vbuckets=1, ack=ack) as node:
        client = binary(node)
        exercise_binary(client)
        assert client.flush_all()
        assert client.get("object") is None


@package("bmemcached")
def test_binary_memcached_logs_in(binary: Callable[..., Any], guarded: EmbeddedNode) -> None:
    exercise_binary(binary(guarded, username="alice", password="secret"))


@package("bmemcached")
def test_binary_memcached_with_the_wrong_password(binary: Callable[..., Any], guarded: EmbeddedNode) -> None:
    from bmemcached.exceptions import AuthenticationNotSupported, InvalidCredentials, MemcachedException

    client = binary(guarded, username="alice", password="wrong")
    with pytest.raises((InvalidCredentials, AuthenticationNotSupported, MemcachedException)):
        client.set("k", "v")


@package("bmemcached")
def test_binary_memcached_without_a_login(binary: Callable[..., Any], guarded: EmbeddedNode) -> None:
    from bmemcached.exceptions import MemcachedException

    client = binary(guarded)
    with pytest.raises(MemcachedException):
        client.set("k", "v")


# Couchbase's own SDK


Connect = Callable[..., Any]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Opens a collection with the SDK and closes the connection at the end."""
    from couchbase.auth import PasswordAuthenticator
    from couchbase.cluster import Cluster
    from couchbase.options import ClusterOptions, ClusterTimeoutOptions

    opened: list[Any] = []

    def open_(
        node: EmbeddedNode,
        name: str,
        password: str,
        bucket: str = "default",
        patience_s: float = 20,
        trusted: Path | None = None,
        **settings: str,
    ) -> Any:
        patience = timedelta(seconds=patience_s)
        times = ClusterTimeoutOptions(bootstrap_timeout=patience, connect_timeout=patience, kv_timeout=patience)
        query = "&".join(f"{key}={value}" for key, value in settings.items())
        scheme, trust = ("couchbase", {}) if trusted is None else ("couchbases", {"cert_path": str(trusted)})
        cluster = Cluster(
            f"{scheme}://{node.address}?{query}",
            ClusterOptions(PasswordAuthenticator(name, password, **trust), timeout_options=times),
        )
        opened.append(cluster)
        return cluster.bucket(bucket).default_collection()

    yield open_
    for cluster in opened:
        cluster.close()


def exercise_sdk(collection: Any) -> None:
    exercise_sdk_items(collection)
    exercise_sdk_binary(collection)
    exercise_sdk_locks(collection)


def exercise_sdk_items(collection: Any) -> None:
    from couchbase.exceptions import CASMismatchException, DocumentExistsException, DocumentNotFoundException
    from couchbase.options import ReplaceOptions

    first = collection.upsert("k", {"a": 1})
    token = first.mutation_token()
    assert (token.bucket_name, token.sequence_number) == ("default", 1)
    assert collection.get("k").content_as[dict] == {"a": 1}
    assert collection.get("k").cas == first.cas
    with pytest.raises(DocumentExistsException):
        collection.insert("k", 0)
    second = collection.replace("k", [1, 2], ReplaceOptions(cas=first.cas))
    with pytest.raises(CASMismatchException):
        collection.replace("k", [3], ReplaceOptions(cas=first.cas))
    assert collection.exists("k").cas == second.cas
    assert not collection.exists("none").exists
    assert collection.touch("k", timedelta(seconds=1000)).cas > second.cas
    assert collection.get_and_touch("k", timedelta(seconds=1000)).content_as[list] == [1, 2]
    assert collection.upsert_multi({f"many{n}": n for n in range(200)}).all_ok
    found = collection.get_multi([f"many{n}" for n in range(200)]).results
    assert {key: result.content_as[int] for key, result in found.items()} == {f"many{n}": n for n in range(200)}
    assert collection.remove("k").cas
    for call in (collection.get, collection.remove):
        with pytest.raises(DocumentNotFoundException):
            call("k")


def exercise_sdk_binary(collection: Any) -> None:
    from couchbase.exceptions import DocumentNotFoundException
    from couchbase.options import (
        DecrementOptions,
        DeltaValue,
        GetOptions,
        IncrementOptions,
        SignedInt64,
        UpsertOptions,
    )
    from couchbase.transcoder import RawBinaryTranscoder

    binary = collection.binary()
    assert binary.increment("n", IncrementOptions(delta=DeltaValue(3), initial=SignedInt64(10))).content == 10
    assert binary.increment("n", IncrementOptions(delta=DeltaValue(3))).content == 13
    assert binary.decrement("n", DecrementOptions(delta=DeltaValue(20))).content == 0
    with pytest.raises(DocumentNotFoundException):
        binary.append("b", b"2")
    collection.upsert("b", b"1", UpsertOptions(transcoder=RawBinaryTranscoder()))
    binary.append("b", b"2")
    binary.prepend("b", b"0")
    assert collection.get("b", GetOptions(transcoder=RawBinaryTranscoder())).value == b"012"


def exercise_sdk_locks(collection: Any) -> None:
    from couchbase.exceptions import CouchbaseException, DocumentLockedException, DocumentNotLockedException
    from couchbase.options import GetAndLockOptions, ReplaceOptions, UpsertOptions

    soon = timedelta(milliseconds=50)  # the SDK tries again until its patience is over
    collection.upsert("locked", 1)
    locked = collection.get_and_lock("locked", timedelta(seconds=30))
    with pytest.raises(DocumentLockedException):
        collection.get_and_lock("locked", timedelta(seconds=30), GetAndLockOptions(timeout=soon))
    with pytest.raises(DocumentLockedException):
        collection.upsert("locked", 2, UpsertOptions(timeout=soon))
    collection.unlock("locked", locked.cas)
    with pytest.raises(DocumentNotLockedException):
        collection.unlock("locked", locked.cas)
    again = collection.get_and_lock("locked", timedelta(seconds=30))
    assert collection.replace("locked", 3, ReplaceOptions(cas=again.cas)).cas
    with pytest.raises(CouchbaseException):
        collection.unlock("none", 1)


@package("couchbase")
@pytest.mark.parametrize(
    "mechanism", [None, "PLAIN", "SCRAM-SHA1", "SCRAM-SHA256", "SCRAM-SHA512"], ids=lambda name: name or "default"
)
def test_couchbase_sdk(connect: Connect, users: Path, mechanism: str | None) -> None:
    settings = {} if mechanism is None else {"sasl_mech_force": mechanism}
    with start(users=str(users)) as node:
        collection = connect(node, "alice", "secret", **settings)
        if mechanism in (None, "PLAIN"):
            exercise_sdk(collection)
        else:
            assert collection.upsert("k", 1).cas == collection.get("k").cas


@package("couchbase")
def test_couchbase_sdk_over_tls(connect: Connect, users: Path, tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    trusted, cert, key = tmp_path / "ca.pem", tmp_path / "cert.pem", tmp_path / "key.pem"
    authority.cert_pem.write_to_path(str(trusted))
    key.write_bytes(issued.private_key_pem.bytes())
    cert.write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
    with start(users=str(users), tls_cert=str(cert), tls_key=str(key)) as node:
        exercise_sdk_items(connect(node, "alice", "secret", trusted=trusted))


@package("couchbase")
def test_couchbase_sdk_waits_for_the_disk(connect: Connect, users: Path, tmp_path: Path) -> None:
    from couchbase.durability import ClientDurability, PersistToExtended, ReplicateTo
    from couchbase.options import RemoveOptions, UpsertOptions

    with start(users=str(users), data=str(tmp_path / "data"), ack="disk", vbuckets=64) as node:
        collection = connect(node, "alice", "secret")
        exercise_sdk(collection)
        durable = ClientDurability(ReplicateTo.NONE, PersistToExtended.ACTIVE)
        assert collection.upsert("k", 1, UpsertOptions(durability=durable)).cas
        assert collection.remove("k", RemoveOptions(durability=durable)).cas


@package("couchbase")
def test_couchbase_sdk_and_what_is_not_understood(connect: Connect) -> None:
    from couchbase.durability import Durability, ServerDurability
    from couchbase.exceptions import UnsupportedOperation
    from couchbase.options import UpsertOptions

    with start() as node:
        collection = connect(node, "anybody", "anything", sasl_mech_force="PLAIN")
        for options in (
            UpsertOptions(durability=ServerDurability(Durability.MAJORITY)),
            UpsertOptions(preserve_expiry=True),
        ):
            with pytest.raises(UnsupportedOperation):
                collection.upsert("k", 1, options)
        accepted = node.call(lambda: node.node.state.counters.connections_total)
        assert collection.upsert("k", 1).cas
        assert node.call(lambda: node.node.state.counters.connections_total) == accepted, "it kept its connection"


@package("couchbase")
def test_couchbase_sdk_is_refused_with_the_wrong_password(connect: Connect, guarded: EmbeddedNode) -> None:
    from couchbase.exceptions import AuthenticationException

    with pytest.raises(AuthenticationException):
        connect(guarded, "alice", "wrong")


@package("couchbase")
def test_couchbase_sdk_without_the_role(connect: Connect, guarded: EmbeddedNode) -> None:
    from couchbase.exceptions import AuthenticationException, DocumentNotFoundException

    collection = connect(guarded, "bob", "hidden")
    with pytest.raises(DocumentNotFoundException):
        collection.get("nothing")
    with pytest.raises(AuthenticationException):
        collection.upsert("k", 1)


@package("couchbase")
def test_couchbase_sdk_and_a_bucket_that_is_not_there(connect: Connect, guarded: EmbeddedNode) -> None:
    from couchbase.exceptions import CouchbaseException

    with pytest.raises(CouchbaseException):  # the SDK asks again as long as it has patience: it might be new
        connect(guarded, "alice", "secret", bucket="other", patience_s=1)


@package("couchbase")
def test_couchbase_sdk_without_login(connect: Connect) -> None:
    with start() as node:
        collection = connect(node, "anybody", "anything", sasl_mech_force="PLAIN")
        assert collection.upsert("k", 1).cas == collection.get("k").cas
