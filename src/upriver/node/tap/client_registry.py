"""The registered TAP clients, stored over a restart of the node: each in a small file of its own.

Theory of operation. A client's position is useful only if the node knows everything that the client may hold, because
changes that a crash has lost must not stay with the client. While the client is connected, that changes with every
message. So before the first message its file says that it is connected, and after it has left, its position. If a
starting node finds a connected client, the node has crashed: it cannot know what the client holds, and the client
starts over. A client that was away continues as if the node had never stopped, if the history still has its position.

Other threads write the files, so that sessions do not wait for a disk. Nothing is sent to a client before its file says
that it is connected.

The files do not belong in a backup: after a restore, clients have moved on without it.
"""

import base64
import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from upriver.errors import StorageError, UpriverError
from upriver.files import UNFINISHED, remove, storage_errors, write_atomically
from upriver.model import Snapshot, StreamPosition
from upriver.node.state import Scheduler
from upriver.protocol.tap import LOST, NEVER, PositionTable, TapClient, TapPlan, TapPosition

#: Called when a write is on disk, or with the error.
Done = Callable[[StorageError | None], object]


class TapRegistry:
    """The files of a node's registered clients; without a directory nothing is stored."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    @property
    def keeps(self) -> bool:
        """Whether clients are stored on disk."""
        return self._directory is not None

    def load(self, vbuckets: Iterable[int]) -> Iterator[TapClient]:
        """All stored clients; ``vbuckets`` are those that a client of all vbuckets may have received."""
        if self._directory is None or not self._directory.is_dir():
            return
        for path in sorted(self._directory.iterdir()):
            if path.name.endswith(UNFINISHED):
                with storage_errors(path):
                    remove(path)
                continue
            try:
                stored = json.loads(path.read_bytes())
                client = _client(stored, vbuckets)
            except OSError as error:
                raise StorageError(str(path), error.strerror or str(error)) from None
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError, UpriverError):
                raise StorageError(
                    str(path), "not a registered TAP client; remove the file to let the client start over"
                ) from None
            yield client

    def keep(self, client: TapClient) -> None:
        """Store a client; it is on disk when this returns."""
        if self._directory is not None:
            path = self._path(self._directory, client.name)
            with storage_errors(path):
                self._directory.mkdir(exist_ok=True)
                write_atomically(path, json.dumps(_stored(client)).encode())

    def drop(self, name: str) -> None:
        """Remove a client's file."""
        if self._directory is not None:
            path = self._path(self._directory, name)
            with storage_errors(path):
                remove(path)

    @staticmethod
    def _path(directory: Path, name: str) -> Path:
        """The file of a client. Its name is a hash: client names may be longer than file names, with any characters."""
        return directory / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"


@dataclass(slots=True)
class _DiskWrite:
    """A write, and its callbacks."""

    work: Callable[[], None]
    done: Done | None = None
    #: Callbacks of removals, which are always called. Other callbacks are dropped when a newer write replaces theirs.
    removers: list[Done] = field(default_factory=list)

    def run(self) -> StorageError | None:
        """Run the write; return its error."""
        try:
            self.work()
        except StorageError as error:
            return error
        except Exception as error:  # the callbacks must learn of any error
            return StorageError("a registered TAP client", repr(error))
        return None


class RegistryWriter:
    """Writes a registry in other threads: one write per client at a time, and of those that wait only the last."""

    def __init__(self, registry: TapRegistry, scheduler: Scheduler) -> None:
        self._registry = registry
        self._scheduler = scheduler
        #: The clients with a write under way, and the write that follows it, if any.
        self._next: dict[str, _DiskWrite | None] = {}
        #: The clients whose last write failed.
        self._failed: set[str] = set()

    @property
    def idle(self) -> bool:
        """Whether all writes are complete."""
        return not self._next

    def is_written(self, name: str) -> bool:
        """Whether the client's state is on disk."""
        return name not in self._next and name not in self._failed

    def keep(self, client: TapClient, done: Done) -> None:
        """Store the client's state; call back when it is on disk, unless a newer write replaces this one."""
        client.settle()
        known = dataclasses.replace(client)
        self._ask(client.name, _DiskWrite(partial(self._registry.keep, known), done))

    def drop(self, name: str, done: Done) -> None:
        """Remove the client's file, and call back."""
        self._ask(name, _DiskWrite(partial(self._registry.drop, name), removers=[done]))

    def _ask(self, name: str, write: _DiskWrite) -> None:
        if not self._registry.keeps:
            self._tell(write, None)
        elif name not in self._next:
            self._begin(name, write)
        else:
            waiting = self._next[name]
            if waiting is not None:
                write.removers[:0] = waiting.removers
            self._next[name] = write

    def _begin(self, name: str, write: _DiskWrite) -> None:
        self._next[name] = None
        self._scheduler.on_disk(write.run, lambda error: self._ended(name, write, error))

    def _ended(self, name: str, write: _DiskWrite, error: StorageError | None) -> None:
        (self._failed.discard if error is None else self._failed.add)(name)
        following = self._next.pop(name)
        if following is not None:
            self._begin(name, following)
        self._tell(write, error)

    @staticmethod
    def _tell(write: _DiskWrite, error: StorageError | None) -> None:
        for done in (write.done, *write.removers):
            if done is not None:
                done(error)


def _stored(client: TapClient) -> dict[str, Any]:
    return {
        "name": client.name,
        "created": client.created,
        "left_at": client.left_at,
        "reconnects": client.reconnects,
        "plan": None if client.plan is None else dataclasses.asdict(client.plan),
        "connected": client.connected,
        "done": client.done,
        "positions": base64.b64encode(client.positions.packed).decode(),
        "elsewhere": None if client.elsewhere is None else _numbers_of(client.elsewhere),
    }


def _client(stored: dict[str, Any], vbuckets: Iterable[int]) -> TapClient:
    plan, done = _plan(stored["plan"]), bool(stored.get("done", False))
    table = _table(stored, plan, done=done)
    elsewhere = stored.get("elsewhere", [0, 0, 0] if plan.vbuckets is None else None)
    if stored["connected"]:
        table = table.with_positions(_lost(plan.vbuckets or tuple(vbuckets), TapPosition.first(plan)))
    return TapClient(
        str(stored["name"]),
        float(stored["created"]),
        flags=int(plan.flags),
        plan=plan,
        registered=True,
        reconnects=int(stored["reconnects"]),
        done=done,
        left_at=float(stored["left_at"] or stored["created"]),
        table=table,
        elsewhere=None if elsewhere is None else _position(elsewhere, plan, done=done),
    )


def _table(stored: dict[str, Any], plan: TapPlan, *, done: bool) -> PositionTable:
    """Read the positions. Older files have a list of numbers for each vbucket."""
    if "places" in stored:
        found = {int(number): _position(each, plan, done=done) for number, each in stored["places"].items()}
        return PositionTable.of(found)
    table = PositionTable(base64.b64decode(stored["positions"], validate=True))
    table.check()
    return table


@functools.lru_cache(maxsize=16)
def _lost(vbuckets: tuple[int, ...], first: TapPosition) -> dict[int, TapPosition]:
    """Positions that no history continues from. Most clients ask for the same vbuckets."""
    return dict.fromkeys(vbuckets, dataclasses.replace(first, position=LOST))


def _plan(stored: dict[str, Any]) -> TapPlan:
    """Read a plan. Older files have ``full`` and perhaps ``whole_from`` in place of ``since``."""
    known = {field.name: stored[field.name] for field in dataclasses.fields(TapPlan)}
    if "full" in stored:
        known["since"] = 0 if stored["full"] else min(stored.get("whole_from", NEVER), NEVER)
    return TapPlan(**known | {"vbuckets": None if stored["vbuckets"] is None else tuple(map(int, stored["vbuckets"]))})


def _numbers_of(tap_position: TapPosition) -> list[int]:
    position = tap_position.position
    served = (tap_position.acks, tap_position.keys_only, tap_position.dumping)
    return [
        position.vbucket_uuid,
        position.seqno,
        tap_position.reached,
        tap_position.known,
        tap_position.since,
        tap_position.until,
        *map(int, served),
    ]


def _position(stored: list[int], plan: TapPlan, *, done: bool) -> TapPosition:
    """Read a position. Older files have fewer numbers; the plan has the rest."""
    vbucket_uuid, seqno, reached, *rest = map(int, stored)
    served = plan.acks, plan.keys_only, plan.dump and not done
    known, since, until, acks, keys_only, dumping = rest or (seqno, plan.since, seqno, *served)
    return TapPosition(
        position=StreamPosition(vbucket_uuid, seqno, Snapshot(seqno, reached)),
        known=known,
        since=since,
        until=until,
        acks=bool(acks),
        keys_only=bool(keys_only),
        dumping=bool(dumping),
    )
