"""The disk of a running node, which fails when a test says so."""

import errno
import time

import lmdb
import pytest

from tests.support.node_process import PATIENCE_S
from upriver.engine.storage.interface import WriteBatch
from upriver.engine.storage.lmdb import LmdbStorage
from upriver.node import EmbeddedNode


class FailingDisk:
    """Fails as often as told, in the middle of a transaction as a real disk does."""

    def __init__(self, node: EmbeddedNode, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failures = 0
        self._node = node
        storage = node.bucket.storage
        assert isinstance(storage, LmdbStorage)
        write = storage._write

        def fails(txn: lmdb.Transaction, batch: WriteBatch) -> None:
            write(txn, batch)
            if self.failures:
                self.failures -= 1
                raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(storage, "_write", fails)

    def work(self) -> None:
        """Let the disk work, and wait until the node has written everything."""
        self.failures = 0
        bucket, deadline = self._node.bucket, time.monotonic() + PATIENCE_S
        while self._node.call(lambda: bool(bucket.ledger.refusal or bucket.ledger.pending_bytes)):
            assert time.monotonic() < deadline, "the node does not write again"
