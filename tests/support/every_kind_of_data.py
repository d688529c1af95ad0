"""Every kind of data in a node, and what raw gets find of it."""

from collections.abc import Sequence

from tests.support.node_process import Client
from upriver.model import vbucket_of
from upriver.wire import Request
from upriver.wire.dialects.memcached import Delete, DeleteWithMeta, Flush, Get, GetLocked, Set, SetWithMeta

VBUCKETS = 8
LARGE = b'{"pad": "%s"}' % (b"x" * (20 * 2**20 - 1000))
#: A document: vbucket and key, then value and flags.
Documents = dict[tuple[int, bytes], tuple[bytes, int]]


def own(key: bytes) -> int:
    """The vbucket of a key."""
    return vbucket_of(key, VBUCKETS)


def other(key: bytes) -> int:
    """Another vbucket, and not 0: a request without a vbucket goes to its key's."""
    return (own(key) + 3) % VBUCKETS or VBUCKETS - 1 - own(key)


KEYS = [b"before flush", b"empty", b"large", b"\xff\x00binary", "schön".encode(), b"expiring", b"expired", b"deleted",
        b"recreated", b"locked", b"with meta", b"deleted with meta", b"misplaced", b"twin", b"json", b"text", b"flags",
        *(b"many%d" % number for number in range(200))]  # fmt: skip


def write_everything(port: int, *, large: bytes = LARGE) -> None:
    """Write every kind of data; one item is about to expire."""
    _send(port, [
        Set(key=b"before flush", value=b"1"),
        Set(key=b"text", value=b"old"),
        Flush(),
        Set(key=b"empty", value=b""),
        Set(key=b"large", value=large),
        Set(key=b"\xff\x00binary", value=bytes(range(256))),
        Set(key="schön".encode(), value="schön".encode(), flags=7),
        Set(key=b"expiring", value=b"later", expiration=3600),
        Set(key=b"expired", value=b"soon", expiration=1),
        Set(key=b"deleted", value=b"1"),
        Delete(key=b"deleted"),
        Set(key=b"recreated", value=b"1"),
        Delete(key=b"recreated"),
        Set(key=b"recreated", value=b"2"),
        Set(key=b"locked", value=b"1"),
        GetLocked(key=b"locked", lock_time=29),
        SetWithMeta(key=b"with meta", value=b"1", rev_seqno=77, item_cas=12345, flags=3),
        Set(key=b"deleted with meta", value=b"1"),
        DeleteWithMeta(key=b"deleted with meta", rev_seqno=99, item_cas=2**63),
        Set(key=b"json", value=b'{"a": [1, null]}'),
        Set(key=b"text", value=b"new"),
        Set(key=b"flags", value=b"1", flags=0xFFFFFFFF),
        *(Set(key=b"many%d" % number, value=b"%d" % number) for number in range(200)),
        Set(key=b"twin", value=b"own"),
        Set(key=b"twin", value=b"elsewhere", vbucket=other(b"twin")),
        Set(key=b"misplaced", value=b"elsewhere", vbucket=other(b"misplaced")),
    ])  # fmt: skip


def change_everything(port: int) -> None:
    """Change, delete and create again what ``write_everything`` has written."""
    _send(port, [
        Set(key=b"empty", value=b"full"),
        Set(key=b"text", value=b""),
        Delete(key=b"\xff\x00binary"),
        Set(key=b"deleted", value=b"back", flags=5),
        Delete(key=b"recreated"),
        Set(key=b"large", value=b"small"),
        Set(key=b"deleted with meta", value=b"back"),
        DeleteWithMeta(key=b"with meta", rev_seqno=78, item_cas=2**62),
        Set(key=b"json", value=b'{"a": 1, "b": "two"}'),
        *(Delete(key=b"many%d" % number) for number in range(100)),
        Delete(key=b"twin"),
        Set(key=b"twin", value=b"alone", vbucket=other(b"twin")),
        Set(key=b"misplaced", value=b"at home"),
        Delete(key=b"misplaced", vbucket=other(b"misplaced")),
    ])  # fmt: skip


def flush_everything(port: int) -> None:
    """Remove everything, and write a few documents after that."""
    _send(port, [Flush(), *(Set(key=b"many%d" % number, value=b"after") for number in range(20))])


def _send(port: int, requests: Sequence[Request]) -> None:
    with Client(port) as client:
        for request in requests:
            if getattr(request, "key", b"") and not request.vbucket:
                request.vbucket = own(request.key)  # type: ignore[attr-defined]
            assert client.ask(request).status == 0, request


def raw(port: int) -> Documents:
    """What a client finds by asking for every key in every vbucket."""
    found: Documents = {}
    with Client(port) as client:
        for key in KEYS:
            for number in range(VBUCKETS):
                reply = client.ask(Get(key=key, vbucket=number))
                if reply.status == 0:
                    found[number, key] = reply.body[4:], int.from_bytes(reply.body[:4], "big")
                else:
                    assert reply.status == 1, (key, number, reply)
    return found
