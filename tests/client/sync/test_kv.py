"""The synchronous key-value client."""

import inspect
import pydoc

import pytest

from upriver.client import KvClient, SyncKvClient
from upriver.errors import KeyExists
from upriver.node import EmbeddedNode


def test_it_reads_and_writes(upriver_node: EmbeddedNode) -> None:
    with SyncKvClient(upriver_node.address, timeout_s=20) as kv:
        written = kv.set("a", "1", flags=7)
        item = kv.get("a")
        assert item is not None
        assert (item.value, item.flags, item.cas) == (b"1", 7, written.cas)
        with pytest.raises(KeyExists):
            kv.add("a", "2")
        assert kv.set_many({"b": b"2", "c": b"3"}) == {}
        assert set(kv.get_many(["a", "b", "c", "d"])) == {b"a", b"b", b"c"}
        assert kv.timeout_s == 20
        assert kv.cluster_map.vbuckets == 64


def test_help_shows_every_operation() -> None:
    text = pydoc.plain(pydoc.render_doc(SyncKvClient))
    for name in ("get", "set", "get_many", "set_many", "delete", "timeout_s"):
        assert name in dir(SyncKvClient)
        assert f" {name}" in text
        assert getattr(SyncKvClient, name).__doc__
    assert inspect.signature(SyncKvClient.set) == inspect.signature(KvClient.set)
