"""``upriver user``: the users of a node."""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from upriver.cli.errors import InputError
from upriver.cli.output import can_prompt
from upriver.errors import UpriverError, UserError
from upriver.node.auth import Role, User, Users, prepared_name

_users_option = click.option(
    "--users",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    default="users.json",
    envvar="UPRIVER_USERS",
    show_default=True,
    show_envvar=True,
    help="Users file.",
)


@click.group(no_args_is_help=False)
def user() -> None:
    """Add, list and remove the users of a node.

    The users file holds names, roles and salted SCRAM credentials, but no passwords. A running node notices changes to
    the file without a restart.

    \b
    Examples:
      upriver user add alice --roles read,write
      pass show upriver/indexer | upriver user add indexer --roles stream --password-stdin
      upriver user list
      upriver user remove alice
    """


@user.command()
@click.argument("name")
@click.option("--roles", required=True, help="Roles, separated by commas: read, write, stream, admin.")
@click.option("--password-stdin", is_flag=True, help="Read the password from standard input, without a prompt.")
@click.option("--replace", is_flag=True, help="Replace the roles and the password of an existing user.")
@_users_option
def add(name: str, roles: str, password_stdin: bool, replace: bool, path: Path) -> None:
    """Add a user; creates the file if necessary."""
    with _complaints():
        name, granted = prepared_name(name), Role.named(filter(None, map(str.strip, roles.split(","))))
        if not replace and path.exists() and name in Users.load(path):
            raise UserError("already exists", name)  # before the prompt for a password
        added = User.create(name, _password_given() if password_stdin else _password_asked(), granted)
        with Users.edit(path, create=True) as users:
            users.add(added, replace=replace)
    click.echo(f"{path}: {name} may {', '.join(granted.names)}")


@user.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of names and roles.")
@_users_option
def list_users(as_json: bool, path: Path) -> None:
    """List the users and their roles."""
    with _complaints():
        users = list(Users.load(path))
    if as_json:
        listed = [{"name": each.name, "roles": each.roles.names} for each in users]
        click.echo(json.dumps(listed, indent=2, ensure_ascii=False))
        return
    width = max((len(each.name) for each in users), default=0)
    for each in users:
        click.echo(f"{each.name:<{width}}  {','.join(each.roles.names)}")


@user.command()
@click.argument("name")
@_users_option
def remove(name: str, path: Path) -> None:
    """Remove a user."""
    with _complaints(), Users.edit(path) as users:
        users.remove(name)
    click.echo(f"{path}: {name} is removed")


@contextlib.contextmanager
def _complaints() -> Iterator[None]:
    try:
        yield
    except UpriverError as error:
        raise InputError(str(error)) from None
    except OSError as error:
        raise InputError(f"{error.filename}: {error.strerror}") from None


def _password_asked() -> str:
    if not can_prompt():
        raise InputError("cannot prompt for a password: standard input is not a terminal; use --password-stdin")
    return str(click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True))


def _password_given() -> str:
    """The only line on standard input."""
    try:
        given = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError:
        raise InputError("the password must be UTF-8") from None
    password = given.removesuffix("\n").removesuffix("\r")
    if "\n" in password:
        raise InputError("standard input has more than one line: give only the password")
    return password
