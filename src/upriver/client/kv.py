"""A key-value client: single operations and bulk operations.

Each request goes to the owner of the key's vbucket. If the node no longer owns it, the client fetches the newest map
and sends the request to the new owner. Requests that were certainly not carried out (temporary failure, not my vbucket,
no connection) are retried until the timeout. When a connection is lost after a request was sent, the outcome is
unknown: the client repeats reads and unconditional sets, and raises ``ConnectionLost`` for everything else. It does the
same with a change that the node has made but cannot store (``DurabilityAmbiguous``): a second increment or append would
count twice.
"""

import asyncio
import contextlib
import struct
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Self, TypeVar

from upriver.client.bulk import BulkWork, RecordBatchLike, keys_batch, store_batch
from upriver.client.cluster.cluster import Cluster
from upriver.client.cluster.cluster_map import ClusterMap
from upriver.client.transport.address import Address, Endpoint
from upriver.client.transport.backoff import Backoff
from upriver.client.transport.connection import AGENT, CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S, Connection
from upriver.client.transport.replies import Reply
from upriver.errors import (
    Busy,
    ConnectionLost,
    DurabilityAmbiguous,
    KeyNotFound,
    NodeUnavailable,
    NotMyVbucket,
    OutOfMemory,
    StatusError,
    TemporaryFailure,
    Unreachable,
)
from upriver.model import SNAPPY, inflated
from upriver.wire import Request, memcached
from upriver.wire.dialects.memcached import MetaOption

T = TypeVar("T")
Key = bytes | str
#: Keys with their values. Mappings are invariant in their keys, so each type of key is listed.
Items = (
    Mapping[bytes, bytes | str]
    | Mapping[str, bytes | str]
    | Mapping[Key, bytes | str]
    | Iterable[tuple[Key, bytes | str]]
)
_U32: Final = struct.Struct(">I")
_PLACE: Final = struct.Struct(">QQ")
_META: Final = struct.Struct(">IIIQ")
#: The expiration that tells a node not to create the number.
_NO_CREATION: Final = 0xFFFFFFFF
#: Errors after which a retry may succeed.
FOR_NOW: Final = (TemporaryFailure, Busy, OutOfMemory)


@dataclass(frozen=True, slots=True)
class Item:
    """The value of a key, with its flags and CAS."""

    value: bytes
    flags: int = 0
    cas: int = 0
    datatype: int = 0


@dataclass(frozen=True, slots=True)
class Written:
    """The result of a write: its CAS and, if the node returns them, the vbucket uuid and seqno."""

    cas: int
    vbucket: int
    vbucket_uuid: int | None = None
    seqno: int | None = None


@dataclass(frozen=True, slots=True)
class Meta:
    """The metadata of a key."""

    deleted: bool
    flags: int
    expiry: int
    rev_seqno: int
    cas: int


class KvClient:
    """Reads and writes keys of a cluster.

    ::

        async with KvClient("127.0.0.1:11210") as kv:
            await kv.set("key", b"value")
            item = await kv.get("key")
    """

    #: The connections of this client, and the cluster map that it follows.
    cluster: Cluster
    #: The time limit of an operation with all its attempts.
    timeout_s: float

    def __init__(
        self,
        address: str | Address,
        *,
        timeout_s: float = REQUEST_TIMEOUT_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        agent: str = AGENT,
    ) -> None:
        """Create a client; ``timeout_s`` limits an operation with all its attempts."""
        self.cluster = Cluster(address, agent=agent, connect_timeout_s=connect_timeout_s)
        self.timeout_s = timeout_s

    @property
    def cluster_map(self) -> ClusterMap:
        """The newest known cluster map."""
        return self.cluster.map

    async def __aenter__(self) -> Self:
        try:
            await self.cluster.open()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self.cluster.close()

    # Reading

    async def get(self, key: Key) -> Item | None:
        """Read a key; None if it does not exist."""
        return await self._found(key, memcached.Get(key=_bytes(key)))

    async def gat(self, key: Key, expiry: int) -> Item | None:
        """Read a key and set its expiry; None if it does not exist."""
        return await self._found(key, memcached.Gat(key=_bytes(key), expiration=expiry), twice=False)

    async def lock(self, key: Key, seconds: int = 15) -> Item:
        """Read a key and lock it against changes; its CAS unlocks it."""
        request = memcached.GetLocked(key=_bytes(key), lock_time=seconds)
        return _item(await self._ask(key, request, retry_for_now=False))

    async def meta(self, key: Key) -> Meta | None:
        """Read the metadata of a key, deleted or not; None if the node has none."""
        try:
            reply = await self._ask(key, memcached.GetMeta(key=_bytes(key)), twice=True)
        except KeyNotFound:
            return None
        deleted, flags, expiry, rev_seqno = _META.unpack_from(reply.extras)
        return Meta(bool(deleted), flags, expiry, rev_seqno, reply.cas)

    async def get_many(self, keys: Iterable[Key]) -> dict[bytes, Item]:
        """Read many keys; the result has only those that exist."""
        batch = keys_batch([_bytes(key) for key in keys])
        return await self._bulk().read(batch, _item)

    # Writing

    async def set(
        self, key: Key, value: bytes | str, *, flags: int = 0, expiry: int = 0, cas: int = 0, datatype: int = 0
    ) -> Written:
        """Store a value; with ``cas``, only if the item still has this CAS."""
        return await self._store(memcached.Set, key, value, flags, expiry, cas, datatype, twice=not cas)

    async def add(self, key: Key, value: bytes | str, *, flags: int = 0, expiry: int = 0, datatype: int = 0) -> Written:
        """Store a value if the key does not exist."""
        return await self._store(memcached.Add, key, value, flags, expiry, 0, datatype)

    async def replace(
        self, key: Key, value: bytes | str, *, flags: int = 0, expiry: int = 0, cas: int = 0, datatype: int = 0
    ) -> Written:
        """Store a value if the key exists."""
        return await self._store(memcached.Replace, key, value, flags, expiry, cas, datatype)

    async def append(self, key: Key, value: bytes | str, *, cas: int = 0) -> Written:
        """Append bytes to the value."""
        return await self._write(key, memcached.Append(key=_bytes(key), value=_bytes(value), cas=cas))

    async def prepend(self, key: Key, value: bytes | str, *, cas: int = 0) -> Written:
        """Insert bytes before the value."""
        return await self._write(key, memcached.Prepend(key=_bytes(key), value=_bytes(value), cas=cas))

    async def delete(self, key: Key, *, cas: int = 0) -> Written:
        """Delete a key."""
        return await self._write(key, memcached.Delete(key=_bytes(key), cas=cas))

    async def incr(self, key: Key, delta: int = 1, *, initial: int | None = None, expiry: int = 0) -> int:
        """Add ``delta`` to a number and return the result; ``initial`` is stored if the key does not exist."""
        kind = memcached.Increment if delta >= 0 else memcached.Decrement
        expiration = _NO_CREATION if initial is None else expiry
        request = kind(key=_bytes(key), delta=abs(delta), initial=initial or 0, expiration=expiration)
        return int.from_bytes((await self._ask(key, request)).value, "big")

    async def touch(self, key: Key, expiry: int) -> None:
        """Set the expiry of a key."""
        await self._ask(key, memcached.Touch(key=_bytes(key), expiration=expiry))

    async def unlock(self, key: Key, cas: int) -> None:
        """Release a lock before it expires."""
        await self._ask(key, memcached.Unlock(key=_bytes(key), cas=cas), retry_for_now=False)

    async def set_with_meta(
        self, key: Key, value: bytes | str, *, rev_seqno: int, cas: int, flags: int = 0, expiry: int = 0,
        datatype: int = 0, options: MetaOption | None = None,
    ) -> Written:  # fmt: skip
        """Store a value with the revision and CAS that it has on another node."""
        request = memcached.SetWithMeta(
            key=_bytes(key), value=_bytes(value), rev_seqno=rev_seqno, item_cas=cas, flags=flags, expiration=expiry,
            datatype=datatype, options=options,
        )  # fmt: skip
        return await self._write(key, request)

    async def delete_with_meta(
        self, key: Key, *, rev_seqno: int, cas: int, flags: int = 0, expiry: int = 0,
        options: MetaOption | None = None,
    ) -> Written:  # fmt: skip
        """Delete a key with the revision and CAS that the deletion has on another node."""
        request = memcached.DeleteWithMeta(
            key=_bytes(key), rev_seqno=rev_seqno, item_cas=cas, flags=flags, expiration=expiry, options=options
        )
        return await self._write(key, request)

    async def set_many(self, items: Items, *, flags: int = 0, expiry: int = 0) -> dict[bytes, StatusError]:
        """Store many values; return the refused keys with their errors, empty if all were stored."""
        pairs = items.items() if isinstance(items, Mapping) else items
        rows = [(_bytes(key), _bytes(value)) for key, value in pairs]
        return await self.write_batch(store_batch(rows, flags, expiry))

    async def write_batch(
        self,
        batch: RecordBatchLike,
        *,
        with_meta: bool = False,
        options: MetaOption | None = None,
        keep_vbuckets: bool = False,
    ) -> dict[bytes, StatusError]:
        """Store and delete the rows of an Arrow batch; return the refused keys with their errors.

        ``batch`` has a column key and, unless all rows are deletions, value; it may have any other column of a change.
        ``with_meta`` keeps revision and CAS. The client computes the vbucket of each key; with ``keep_vbuckets`` it
        uses the column vbucket instead.
        """
        return await self._bulk().write(batch, with_meta=with_meta, options=options, keep_vbuckets=keep_vbuckets)

    # Routing

    def _bulk(self) -> BulkWork:
        return BulkWork(self.cluster, self.timeout_s, FOR_NOW)

    async def _found(self, key: Key, request: Request, *, twice: bool = True) -> Item | None:
        try:
            return _item(await self._ask(key, request, twice=twice))
        except KeyNotFound:
            return None

    async def _store(
        self, kind: type[memcached.Set], key: Key, value: bytes | str, flags: int, expiry: int, cas: int, datatype: int,
        *, twice: bool = False,
    ) -> Written:  # fmt: skip
        request = kind(key=_bytes(key), value=_bytes(value), flags=flags, expiration=expiry, cas=cas, datatype=datatype)
        return await self._write(key, request, twice=twice)

    async def _write(self, key: Key, request: Request, *, twice: bool = False) -> Written:
        reply = await self._ask(key, request, twice=twice)
        uuid, seqno = _PLACE.unpack(reply.extras) if len(reply.extras) == _PLACE.size else (None, None)
        return Written(reply.cas, request.vbucket, uuid, seqno)

    async def _ask(self, key: Key, request: Request, *, twice: bool = False, retry_for_now: bool = True) -> Reply:
        await self.cluster.open()
        name = _bytes(key)

        def place() -> tuple[int, Endpoint | None]:
            vbucket = self.cluster.map.vbucket_of(name)
            return vbucket, self.cluster.map.owner(vbucket)

        return await self._routed(place, request, twice=twice, retry_for_now=retry_for_now)

    async def _routed(
        self, place: Callable[[], tuple[int, Endpoint | None]], request: Request, *, twice: bool, retry_for_now: bool
    ) -> Reply:
        loop, backoff = asyncio.get_running_loop(), Backoff()
        deadline = loop.time() + self.timeout_s
        #: An attempt that changed something decides the error: what came of later attempts says less.
        made: DurabilityAmbiguous | None = None
        while True:
            known = self.cluster.map
            request.vbucket, endpoint = place()
            connection: Connection | None = None
            try:
                if endpoint is None:
                    raise NotMyVbucket("the vbucket has no owner now", vbucket=request.vbucket)
                connection = await self.cluster.connection(endpoint)
                return await connection.ask(request, timeout_s=max(0.001, deadline - loop.time()))
            except NotMyVbucket as error:
                if self.cluster.map is not known and place()[1] != endpoint:
                    continue  # the refusal came with a newer map
                failure: Exception = error
                again: Awaitable[object] = self.cluster.refresh(known)
            except Unreachable as error:
                failure, again = error, self.cluster.refresh(known)
            except ConnectionLost as error:
                if connection is not None and not twice:
                    raise
                failure, again = error, self.cluster.refresh(known)
            except DurabilityAmbiguous as error:
                if not twice:
                    raise
                made, failure, again = error, error, _nothing()
            except FOR_NOW as error:
                if not retry_for_now:
                    raise
                failure, again = error, _nothing()
            await self._pause(again, backoff, deadline, made or failure)

    async def _pause(self, again: Awaitable[object], backoff: Backoff, deadline: float, failure: Exception) -> None:
        """Fetch the newest map and pause before a retry; after the deadline, raise the last failure."""
        loop = asyncio.get_running_loop()
        pause_s = backoff.pause_s()
        try:
            async with asyncio.timeout_at(deadline):
                with contextlib.suppress(NodeUnavailable):  # the next attempt reports it
                    await again
                if loop.time() + pause_s >= deadline:
                    raise failure
                await asyncio.sleep(pause_s)
        except TimeoutError:
            raise failure from None


async def _nothing() -> None:
    return


def _bytes(text: bytes | str) -> bytes:
    return text.encode() if isinstance(text, str) else bytes(text)


def _item(reply: Reply) -> Item:
    value, datatype = reply.value, reply.datatype
    if datatype & SNAPPY:
        value, datatype = inflated(value), datatype & ~SNAPPY
    (flags,) = _U32.unpack(reply.extras) if len(reply.extras) == _U32.size else (0,)
    return Item(value, flags, reply.cas, datatype)
