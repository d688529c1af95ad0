"""A model of one vbucket of a source, for tests of planning and of pipelines."""

from dataclasses import dataclass, field

from upriver.model import FailoverEntry, FailoverLog
from upriver.spark.batch_planner import SourceState
from upriver.spark.offsets import VbucketOffset


def failover_log(*entries: tuple[int, int]) -> FailoverLog:
    return FailoverLog(tuple(FailoverEntry(*entry) for entry in entries))


@dataclass
class ModelledVbucket:
    """One vbucket: all versions of its present branch, and the log of those before."""

    versions: list[tuple[int, str, int | None]] = field(default_factory=list)
    log: FailoverLog = field(default_factory=lambda: failover_log((1, 0)))
    exact: bool = False
    #: Every version from here on is retained.
    floor: int = 0
    purge_seqno: int = 0
    uuids: int = 1
    values: int = 0

    @property
    def high(self) -> int:
        return self.versions[-1][0] if self.versions else 0

    @property
    def state(self) -> SourceState:
        return SourceState(self.log, self.high, self.purge_seqno, self.floor if self.exact else None)

    def write(self, key: str, *, delete: bool) -> None:
        self.values += 1
        self.versions.append((self.high + 1, key, None if delete else self.values))

    def fail_over(self, lost: int, *, received: bool = False) -> None:
        """The last changes are gone, and others take their seqnos. A copy that received its history has no old ones."""
        self.versions = self.versions[: max(0, len(self.versions) - lost)]
        self.purge_seqno = min(self.purge_seqno, self.high)
        self.floor = min(self.floor, self.high)
        if received:
            self.forget()
        self.uuids += 1
        self.log = self.log.branch(self.uuids, self.high)

    def forget(self) -> None:
        """No reader gets a version any more that is superseded now."""
        self.floor = self.high

    def purge(self) -> None:
        """Forget the deletions that are current now."""
        newest = {key: seqno for seqno, key, _ in self.versions}
        gone = {key: s for s, key, value in self.versions if value is None and newest[key] == s and s < self.high}
        self.versions = [version for version in self.versions if version[1] not in gone]
        self.purge_seqno = max([self.purge_seqno, *gone.values()])

    def read(self, start: int, end: int) -> list[tuple[int, str, int | None]]:
        """Each key once: the version that is current, or with exact ends the one that was."""
        is_exact = self.exact and self.floor <= end
        newest = {key: seqno for seqno, key, _ in self.versions if not is_exact or seqno <= end}
        return [version for version in self.versions if start < version[0] <= end and newest[version[1]] == version[0]]

    def rollback_for(self, place: VbucketOffset) -> int | None:
        if not place.seqno:
            return None
        index = self.log.index(place.vbucket_uuid)
        if index is None or place.seqno < self.purge_seqno:
            return 0
        upper = self.log.upper(index, self.high)
        return None if place.seqno <= upper else upper

    @property
    def contents(self) -> dict[str, int]:
        return {key: value for key, value in {k: v for _, k, v in self.versions}.items() if value is not None}
