"""Two node processes that answer writes when they are on disk, and the users that they know."""

import asyncio
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.support.restartable_node import RestartableNode
from upriver.node.auth.users import Role, User
from upriver.node.auth.users_file import Users
from upriver.scram import ITERATIONS_MIN

VBUCKETS: Final = 16
#: Name -> roles; each password is the name.
USERS: Final = {
    "writer": Role.READ | Role.WRITE,
    "reader": Role.READ,
    "admin": Role.READ | Role.WRITE | Role.STREAM | Role.ADMIN,
}


class SoakNode(RestartableNode):
    """A node that can be killed and whose disk can be full."""

    def __init__(self, directory: Path, users: Path, initial_vbuckets: str) -> None:
        #: Held while the process is replaced, or must not be.
        self.in_use = asyncio.Lock()
        super().__init__(
            directory, "disk", "dcp", VBUCKETS,
            "--users", str(users), "--initial-vbuckets", initial_vbuckets, "--log-level", "warning",
        )  # fmt: skip

    def limit_files(self, size: int | None) -> None:
        """Files of the process may not grow beyond a size; None for no limit. It works without privileges."""
        _, hard = resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (hard if size is None else size, hard))

    @property
    def largest_file(self) -> int:
        """The size of its largest file."""
        return max(path.stat().st_size for path in self.directory.rglob("*") if path.is_file())

    @property
    def failed_commits(self) -> int:
        """How many log lines of the running process say that it cannot write."""
        return self.process.log.read_text().count("cannot write:")

    def as_user(self, name: str) -> str:
        """The address with a login."""
        return f"upriver://{name}:{name}@{self.address}"


@contextmanager
def soak_cluster(directory: Path) -> Iterator[tuple[SoakNode, SoakNode]]:
    """Two nodes; the first has all vbuckets."""
    users = Users()
    for name, roles in USERS.items():
        users.add(User.create(name, name, roles, iterations=ITERATIONS_MIN))
    users.save(directory / "users.json")
    nodes: list[SoakNode] = []
    try:
        for name, initial in (("first", "all"), ("second", "none")):
            nodes.append(SoakNode(directory / name, directory / "users.json", initial))
        yield nodes[0], nodes[1]
    finally:
        for node in nodes:
            node.kill()
