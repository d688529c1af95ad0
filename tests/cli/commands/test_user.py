"""``upriver user``."""

import json
import stat
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from upriver.cli import main
from upriver.cli.commands import user as user_module
from upriver.node.auth.users import Role
from upriver.node.auth.users_file import Users

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UPRIVER_USERS", raising=False)

    def run(*arguments: str, given: str | bytes | None = None) -> Result:
        return CliRunner().invoke(main, ["user", *arguments], input=given, prog_name="upriver")

    return run


def add(run: Run, name: str, roles: str, *more: str) -> Result:
    return run("add", name, "--roles", roles, "--password-stdin", *more, given="secret\n")


def assert_refused(result: Result, why: str) -> None:
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("upriver user")
    assert why in result.stderr
    assert result.stderr.count("\n") == 1


def test_add_list_remove(run: Run) -> None:
    result = add(run, "alice", "read, write,stream")
    assert (result.exit_code, result.output) == (0, "users.json: alice may read, write, stream\n")
    assert add(run, "administrator", "admin,read").output == "users.json: administrator may admin\n"
    assert stat.S_IMODE(Path("users.json").stat().st_mode) == 0o600
    assert "secret" not in Path("users.json").read_text()
    assert run("list").output == "administrator  admin\nalice          read,write,stream\n"
    assert json.loads(run("list", "--json").output) == [
        {"name": "administrator", "roles": ["admin"]},
        {"name": "alice", "roles": ["read", "write", "stream"]},
    ]
    assert run("remove", "administrator").output == "users.json: administrator is removed\n"
    assert run("remove", "alice").exit_code == 0
    assert (run("list").output, run("list", "--json").output) == ("", "[]\n")


@pytest.mark.parametrize("given", ["secret", "secret\n", "secret\r\n"])
def test_password_from_standard_input(run: Run, given: str) -> None:
    assert run("add", "alice", "--roles", "read", "--password-stdin", given=given).exit_code == 0
    assert Users.load(Path("users.json")).verify_plain("alice", "secret") is not None


def test_password_is_asked_for_twice(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_module, "can_prompt", lambda: True)
    typed = "secret\nsecrte\nsecret\nsecret\n"  # the first two do not match
    result = run("add", "alice", "--roles", "read", given=typed)
    assert result.exit_code == 0
    assert "do not match" in result.stderr
    assert "secret" not in result.output
    assert result.stdout == "users.json: alice may read\n"
    assert Users.load(Path("users.json")).verify_plain("alice", "secret") is not None


def test_which_file(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert add(run, "alice", "read", "--users", "a.json").exit_code == 0
    monkeypatch.setenv("UPRIVER_USERS", "b.json")
    assert add(run, "bob", "read").exit_code == 0
    assert run("list").output == "bob  read\n"
    assert run("list", "--users", "a.json").output == "alice  read\n"
    assert run("remove", "alice", "--users", "a.json").exit_code == 0
    assert not Path("users.json").exists()


def test_replace(run: Run) -> None:
    add(run, "alice", "read")
    assert_refused(add(run, "alice", "admin"), "upriver user add: user 'alice' already exists")
    result = run("add", "alice", "--roles", "admin", "--password-stdin", "--replace", given="other")
    assert result.exit_code == 0
    alice = Users.load(Path("users.json")).verify_plain("alice", "other")
    assert alice is not None
    assert alice.roles is Role.ADMIN


@pytest.mark.parametrize(
    ("name", "roles", "given", "why"),
    [
        ("alice", "root", "secret", "unknown role 'root': choose from read, write, stream, admin"),
        ("alice", "", "secret", "no role given: choose from"),
        ("alice", ",", "secret", "no role given: choose from"),
        ("", "read", "secret", "name that is not empty"),
        ("a\nb", "read", "secret", "user 'a\\nb' cannot have this name: control characters"),
        ("alice", "read", "", "password that is not empty"),
        ("alice", "read", "\n", "password that is not empty"),
        ("alice", "read", "two\nlines\n", "more than one line"),
        ("alice", "read", b"\xff", "must be UTF-8"),
        ("alice", "read", "sec\0ret", "cannot have this password"),
    ],
)
def test_add_refused(run: Run, name: str, roles: str, given: str | bytes, why: str) -> None:
    result = run("add", name, "--roles", roles, "--password-stdin", given=given)
    assert_refused(result, why)
    assert not Path("users.json").exists()


def test_without_a_terminal_there_is_no_prompt(run: Run) -> None:
    assert_refused(run("add", "alice", "--roles", "read", given="secret\n"), "use --password-stdin")


def test_files_that_cannot_be_used(run: Run) -> None:
    assert_refused(run("list"), "upriver user list: users.json: No such file or directory")
    assert_refused(run("remove", "alice"), "upriver user remove: users.json: No such file or directory")
    assert_refused(add(run, "alice", "read", "--users", "absent/users.json"), "No such file or directory")
    Path("users.json").write_text("alice:secret")
    for result in (run("list"), run("remove", "alice"), add(run, "alice", "read")):
        assert_refused(result, "users.json: is not JSON")
    assert Path("users.json").read_text() == "alice:secret"


def test_remove_an_unknown_user(run: Run) -> None:
    add(run, "alice", "read")
    assert_refused(run("remove", "bob"), "upriver user remove: user 'bob' does not exist")


@pytest.mark.parametrize("arguments", [[], ["add", "alice"], ["remove"], ["list", "--all"], ["change"]])
def test_usage_errors(run: Run, arguments: list[str]) -> None:
    assert_refused(run(*arguments), "--help)")


def test_every_command_has_a_help_text() -> None:
    group = main.commands["user"]
    assert isinstance(group, click.Group)
    for command in (group, *group.commands.values()):
        assert command.help
