"""LMDB storage that calls a test before and after a commit."""

from collections.abc import Callable

from upriver.engine.storage.interface import WriteBatch
from upriver.engine.storage.lmdb import LmdbStorage


class InterruptedStorage(LmdbStorage):
    """Something happens while a batch is on its way: what it holds was gathered, and is not on disk yet."""

    before_commit: Callable[[], object] | None = None
    after_commit: Callable[[], object] | None = None

    def commit(self, batch: WriteBatch) -> None:
        before, after = self.before_commit, self.after_commit
        self.before_commit = self.after_commit = None
        if before is not None:
            before()
        super().commit(batch)
        if after is not None:
            after()
