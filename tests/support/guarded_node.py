"""A node that wants a login."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from upriver.node import EmbeddedNode, start
from upriver.node.auth.users import Role, User
from upriver.node.auth.users_file import Users


@pytest.fixture
def guarded_node(tmp_path: Path) -> Iterator[EmbeddedNode]:
    """A node with one user that has every role."""
    path = tmp_path / "users.json"
    users = Users()
    users.add(User.create("me", "secret", Role.ADMIN | Role.READ | Role.WRITE | Role.STREAM))
    users.save(path)
    with start(vbuckets=8, users=str(path)) as node:
        yield node
