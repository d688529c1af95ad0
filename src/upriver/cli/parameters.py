"""Parameters that many commands share: address, vbuckets, JSON output."""

import os
import re
from collections.abc import Callable
from typing import Any, Final

import click

from upriver.cli.errors import InputError
from upriver.cli.output import can_prompt
from upriver.client.transport import PATIENCE_S, Address
from upriver.errors import AddressError, PositionError
from upriver.model import Snapshot, StreamPosition
from upriver.options import as_seconds, as_vbuckets

DEFAULT_ADDRESS: Final = "127.0.0.1:11210"
ADDRESS_VARIABLE: Final = "UPRIVER_ADDRESS"
PASSWORD_VARIABLE: Final = "UPRIVER_PASSWORD"


_POSITION: Final = re.compile(r"(\d{1,4}):(0[xX][0-9a-fA-F]{1,16}|\d{1,20}):(\d{1,20})(?::(\d{1,20}):(\d{1,20}))?")


class AddressType(click.ParamType[Address]):
    """``HOST:PORT`` or a URL."""

    name = "address"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Address:
        """The address, with a password if it names a user."""
        if isinstance(value, Address):
            return value
        try:
            return with_password(Address.parse(value))
        except AddressError as error:
            self.fail(str(error), param, ctx)


class VbucketsType(click.ParamType[tuple[int, ...]]):
    """Numbers and ranges: ``0-511,700``."""

    name = "ranges"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """The numbers in ascending order."""
        if isinstance(value, tuple):
            return value
        try:
            return as_vbuckets(value)
        except ValueError as error:
            self.fail(f"{value!r} must be {error}", param, ctx)


class TimeType(click.ParamType[float]):
    """``500ms``, ``30s`` or ``5m``."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The time in seconds."""
        try:
            return float(as_seconds(value))
        except ValueError as error:
            self.fail(f"{value!r} must be {error}", param, ctx)


class PositionsType(click.ParamType[dict[int, StreamPosition]]):
    """Positions of a consumer: ``VBUCKET:UUID:SEQNO``, optionally with the bounds of the snapshot, per vbucket."""

    name = "positions"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[int, StreamPosition]:
        """The positions by vbucket."""
        if isinstance(value, dict):
            return value
        positions: dict[int, StreamPosition] = {}
        for part in value.split(","):
            found = _POSITION.fullmatch(part.strip())
            if found is None:
                self.fail(f"invalid position {part!r}: use VBUCKET:UUID:SEQNO[:START:END]", param, ctx)
            uuid, seqno = int(found[2], 16 if found[2][1:2] in ("x", "X") else 10), int(found[3])
            if uuid >= 2**64:
                self.fail(f"invalid position {part!r}: a uuid has at most 64 bits", param, ctx)
            try:
                bounds = Snapshot(int(found[4] or seqno), int(found[5] or seqno))
                positions[int(found[1])] = StreamPosition(uuid, seqno, bounds)
            except PositionError as error:
                self.fail(f"invalid position {part!r}: {error}", param, ctx)
        return positions


def with_password(address: Address) -> Address:
    """The address with the password of its user, from the environment variable or from a prompt."""
    if address.user is None or address.password is not None:
        return address
    password = os.environ.get(PASSWORD_VARIABLE)
    if password is None:
        if not can_prompt():
            raise InputError(f"no password for {address.user!r}: set {PASSWORD_VARIABLE}")
        password = str(click.prompt(f"Password of {address.user}", hide_input=True, err=True))
    return address.with_login(address.user, password)


def default_address() -> str:
    """The address that is used when none is given."""
    return os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS


ADDRESS: Final = AddressType()
VBUCKETS: Final = VbucketsType()
TIME: Final = TimeType()
POSITIONS: Final = PositionsType()

#: The last argument of every command that talks to a node.
address_argument: Final = click.argument(
    "address", type=ADDRESS, metavar="[ADDRESS]", envvar=ADDRESS_VARIABLE, default=DEFAULT_ADDRESS
)
json_option: Final = click.option("--json", "as_json", is_flag=True, help="Print JSON lines.")


def vbuckets_option(help_text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The option for vbuckets."""
    return click.option("--vbuckets", type=VBUCKETS, metavar="RANGES", help=help_text)


def patience_option(
    help_text: str = "Give up when a vbucket has had no stream for this long.", default: float | None = PATIENCE_S
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The option for how long to retry."""
    kind = click.FloatRange(0.1)
    return click.option("--patience", type=kind, default=default, show_default=True, metavar="SECONDS", help=help_text)


replicas_option = click.option(
    "--replicas", is_flag=True, help="Read the newest replica of a vbucket that has no active copy."
)
