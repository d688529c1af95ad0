"""Options from calls, the command line, the environment and a file."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from upriver.engine import Retention
from upriver.errors import InvalidArguments
from upriver.node import options as options_module
from upriver.node.options import ListenAddress, NodeOptions, gather, parse_initial_vbuckets, parse_listen
from upriver.wire import DIALECTS, framing


def test_the_bounds_are_those_of_the_engine_and_the_wire() -> None:
    assert options_module.BODY_BYTES_MAX == framing.BODY_BYTES_MAX
    options = NodeOptions()
    assert Retention() == Retention(
        history_s=options.history_s, history_bytes=options.history_bytes, tombstone_s=options.tombstone_s
    )


def test_without_anything_it_listens_on_loopback_in_memory() -> None:
    options = gather({}, {})
    assert (options.host, options.port, options.memory, options.data) == ("127.0.0.1", 11210, True, None)
    assert options.memory_quota == "1GiB"


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('port = 1\nbucket = "file"\nvbuckets = 8\nidle-s = 1.5\n')
    environment = {"UPRIVER_PORT": "2", "UPRIVER_BUCKET": "environment", "OTHER": "x"}
    options = gather({"port": "3", "bucket": None}, environment, str(file))
    assert (options.port, options.bucket, options.vbuckets, options.idle_s) == (3, "environment", 8, 1.5)
    assert gather({}, {"UPRIVER_CONFIG": str(file)}).vbuckets == 8


#: For each option a text that is not its default, and what it means.
TEXTS: dict[str, tuple[str, Any]] = {
    "host": ("::1", "::1"),
    "port": ("0", 0),
    "listen": ("127.0.0.1:0,dialect=upr", "127.0.0.1:0,dialect=upr"),
    "data": ("somewhere", "somewhere"),
    "memory": ("yes", True),
    "bucket": ("beer", "beer"),
    "vbuckets": ("16", 16),
    "initial_vbuckets": ("0-3,7", "0-3,7"),
    "ack": ("disk", "disk"),
    "memory_quota": ("64MiB", "64MiB"),
    "history_s": ("2.5", 2.5),
    "history_bytes": ("1000", 1000),
    "tombstone_s": ("60", 60.0),
    "users": ("users.json", "users.json"),
    "insecure": ("on", True),
    "replicate_locks": ("on", True),
    "tls_cert": ("cert.pem", "cert.pem"),
    "tls_key": ("key.pem", "key.pem"),
    "tls_handshake_s": ("2.5", 2.5),
    "metrics_port": ("0", 0),
    "metrics_host": ("::1", "::1"),
    "stall_s": ("3", 3.0),
    "log_level": ("debug", "debug"),
    "log_format": ("json", "json"),
    "connections_max": ("7", 7),
    "body_bytes_max": ("1000", 1000),
    "unread_bytes_max": ("1000", 1000),
    "unread_total_bytes_max": ("1000", 1000),
    "partial_bytes_max": ("1000", 1000),
    "stuck_s": ("2.5", 2.5),
    "login_s": ("2.5", 2.5),
    "tap_ack_interval": ("7", 7),
    "tap_ack_window": ("70", 70),
    "tap_backoff_s": ("0.5", 0.5),
    "tap_keep_alive_s": ("60", 60.0),
    "tap_noop_interval_s": ("20", 20.0),
    "idle_s": ("0.5", 0.5),
    "keepalive_s": ("9", 9.0),
}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(NodeOptions)])
def test_every_option_comes_from_everywhere(name: str, tmp_path: Path) -> None:
    text, value = TEXTS[name]
    partner = {"tls_cert": {"tls_key": "k"}, "tls_key": {"tls_cert": "c"}}.get(name, {})
    file = tmp_path / "node.toml"
    literal = str(value).lower() if isinstance(value, bool | int | float) else f'"{value}"'
    file.write_text(f"{name} = {literal}\n")
    default = next(field.default for field in dataclasses.fields(NodeOptions) if field.name == name)
    for options in (
        gather({name: text, **partner}, {}),
        gather(partner, {f"UPRIVER_{name.upper()}": text}),
        gather(partner, {}, str(file)),
        NodeOptions(**{name: value, **partner}),
    ):
        assert getattr(options, name) == value != default


@pytest.mark.parametrize(
    ("given", "environment", "file", "data", "memory"),
    [
        ({"memory": True}, {"UPRIVER_DATA": "e"}, "", None, True),
        ({"data": "c"}, {"UPRIVER_MEMORY": "1"}, "", "c", False),
        ({}, {"UPRIVER_MEMORY": "1"}, 'data = "f"', None, True),
        ({}, {"UPRIVER_DATA": "e"}, "memory = true", "e", False),
        ({}, {"UPRIVER_MEMORY": "0"}, 'data = "f"', "f", False),
    ],
)
def test_memory_and_data_override_each_other_from_layer_to_layer(
    given: dict[str, Any], environment: dict[str, str], file: str, data: str | None, memory: bool, tmp_path: Path
) -> None:
    path = tmp_path / "node.toml"
    path.write_text(file)
    options = gather(given, environment, str(path))
    assert (options.data, options.memory) == (data, memory)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"data": "d", "memory": True}, "data and memory exclude each other"),
        ({"tls_cert": "c"}, "tls_cert and tls_key belong together"),
        ({"tls_key": "k"}, "tls_cert and tls_key belong together"),
        ({"port": "http"}, "port = 'http': it must be a whole number from 0 to 65535"),
        ({"port": 70000}, "port = 70000: it must be a whole number from 0 to 65535"),
        ({"port": -1}, "port = -1"),
        ({"port": 1.5}, "port = 1.5: it must be"),
        ({"port": True}, "port = True: it must be"),
        ({"metrics_port": "x"}, "metrics_port"),
        ({"vbuckets": 3}, "power of two"),
        ({"vbuckets": 2048}, "1 to 1024"),
        ({"vbuckets": 0}, "1 to 1024"),
        ({"initial_vbuckets": "5-1"}, "must be all, none or vbuckets with ascending ranges: write 1-5, not 5-1"),
        ({"initial_vbuckets": "1024"}, "vbuckets below 1024 such as 7"),
        ({"initial_vbuckets": "some"}, "0-511,700"),
        ({"ack": "paper"}, "ack = 'paper': it must be one of memory, disk"),
        ({"memory_quota": "much"}, "memory_quota = 'much': it must be 0"),
        ({"memory_quota": "5 XB"}, "a size of at least 1MiB"),
        ({"memory_quota": "1"}, "memory_quota = '1': it must be 0 for no limit, or a size of at least 1MiB"),
        ({"bucket": ""}, "bucket = '': it must be 1 to 100 letters"),
        ({"bucket": "a b"}, "bucket = 'a b'"),
        ({"bucket": "b" * 101}, "it must be 1 to 100"),
        ({"log_level": "loud"}, "it must be one of debug, info, warning, error"),
        ({"log_format": "xml"}, "it must be one of plain, json"),
        ({"insecure": "perhaps"}, "it must be true or false"),
        ({"data": ""}, "give a directory, or use memory"),
        ({"metrics_host": "0.0.0.0"}, "loopback only, not on metrics_host 0.0.0.0"),
        ({"idle_s": "-1"}, "0 to 2^62"),
        ({"idle_s": math.nan}, "idle_s"),
        ({"idle_s": "inf"}, "idle_s"),
        ({"connections_max": 0}, "1 to 2^62"),
        ({"body_bytes_max": 2**32}, "body_bytes_max"),
        ({"unread_bytes_max": "0"}, "1 to 2^62"),
        ({"memory_quota": "99999999999GiB"}, "a size of at least 1MiB"),
        ({"memory_quota": "9" * 400}, "a size of at least 1MiB"),
        ({"unread_bytes_max": 2**64}, "1 to 2^62"),
        ({"partial_bytes_max": "9" * 400}, "whole number"),
        ({"unread_bytes_max": "9" * 5000}, "whole number"),
        ({"stuck_s": "1e300"}, "0 to 2^62"),
        ({"initial_vbuckets": "0-" + "9" * 5000}, "vbuckets below"),
        ({"bucket": ["a"]}, "bucket = "),
        ({"listen": "11211"}, "an address must be HOST:PORT"),
        ({"listen": "h:70000"}, "an address must be HOST:PORT"),
        ({"listen": "::1:5"}, "an address must be HOST:PORT or [HOST]:PORT"),
        ({"listen": "127.0.0.1:5,dialect=esperanto"}, "one of upr_draft1, upr_draft2"),
        ({"listen": "127.0.0.1:5,quick"}, "only anonymous and dialect=NAME may follow"),
        ({"listen": "127.0.0.1:5,anonymous"}, "only upr_draft1 and upr_draft2 may be anonymous"),
        ({"listen": "127.0.0.1:5,dialect=dcp,anonymous"}, "other dialects can log in"),
        ({"listen": "0.0.0.0:5"}, "on loopback only, not on 0.0.0.0:5"),
        ({"listen": "0.0.0.0:5,dialect=upr_draft2,anonymous", "users": "u"}, "or --insecure"),
        ({"host": "0.0.0.0"}, "on loopback only, not on 0.0.0.0"),
        ({"host": ""}, "not on every address"),
        ({"host": "::"}, "not on ::"),
        ({"host": "example.test"}, "not on example.test"),
    ],
)
def test_what_makes_no_sense_is_named(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidArguments) as caught:
        NodeOptions(**given)
    assert complaint in caught.value.detail


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("port", "foo", "port = 'foo': it must be a whole number"),
        ("log_level", "loud", "log_level = 'loud'"),
        ("memory_quota", "much", "memory_quota = 'much'"),
        ("initial_vbuckets", "some", "initial_vbuckets = 'some'"),
        ("listen", "here", "listen = 'here'"),
        ("host", "0.0.0.0", "clients without a login"),
        ("tls_key", "key.pem", "tls_cert and tls_key"),
    ],
)
def test_where_a_bad_value_stands_is_said(name: str, value: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(f"{name} = {value!r}")
    in_environment = {f"UPRIVER_{name.upper()}": value}
    for given, environment, origin in (
        ({}, {}, str(file)),
        ({}, in_environment, f"UPRIVER_{name.upper()}"),
        ({name: value}, in_environment, f"--{name.replace('_', '-')}"),
    ):
        with pytest.raises(InvalidArguments) as caught:
            gather(given, environment, str(file))
        named = complaint.startswith(f"{name} = ") and origin != str(file)  # the name is said once
        expected = f"{origin}{complaint.removeprefix(name)}" if named else f"{origin}: {complaint}"
        assert caught.value.detail.startswith(expected)


def test_nothing_is_said_of_where_a_value_stands_in_a_call() -> None:
    with pytest.raises(InvalidArguments) as caught:
        NodeOptions(port="foo")  # type: ignore[arg-type]
    assert caught.value.detail.startswith("port = 'foo'")


def test_beyond_loopback_with_users_or_on_ones_own_responsibility() -> None:
    assert NodeOptions(host="0.0.0.0", users="users.json").host == "0.0.0.0"
    assert NodeOptions(host="0.0.0.0", insecure=True).insecure


def test_further_addresses() -> None:
    assert parse_listen("") == []
    assert parse_listen("127.0.0.1:5,dialect=upr_draft1,anonymous  [::1]:6,dialect=dcp localhost:7") == [
        ListenAddress("127.0.0.1", 5, "upr_draft1", anonymous=True),
        ListenAddress("::1", 6, "dcp"),
        ListenAddress("localhost", 7),
    ]
    assert ListenAddress("::1", 6).address == "[::1]:6"
    assert NodeOptions(listen="0.0.0.0:5", users="users.json").listen
    assert NodeOptions(listen="0.0.0.0:5", insecure=True).listen


def test_listeners_can_be_pinned_to_every_dialect() -> None:
    assert set(options_module.PINNABLE) == set(DIALECTS) - {"memcached"}
    assert {name for name in DIALECTS if DIALECTS[name].framing is framing.DRAFT} == set(options_module.SHORT_DRAFTS)


def test_a_path_is_a_text(tmp_path: Path) -> None:
    assert NodeOptions(data=tmp_path).data == str(tmp_path)  # type: ignore[arg-type]


def test_initial_vbuckets() -> None:
    assert parse_initial_vbuckets("all", 4) == [0, 1, 2, 3]
    assert parse_initial_vbuckets("none", 4) == []
    assert parse_initial_vbuckets("2, 0-1,1", 4) == [0, 1, 2]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"port = ", "node.toml: "),
        (b"\xff", "node.toml: "),
        (b"prot = 1", "option prot = '1': unknown option; did you mean port"),
        (b"[port]\nx = 1", "port = {'x': 1}: it must be a whole number"),
        (b"vbuckets = '3'", "power of two"),
    ],
)
def test_a_bad_file(text: bytes, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_bytes(text)
    with pytest.raises(InvalidArguments, match=complaint):
        gather({}, {}, str(file))


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidArguments, match="No such file"):
        gather({}, {}, str(tmp_path / "node.toml"))
    for environment, file, origin in (({}, "/nope", "--config"), ({"UPRIVER_CONFIG": "/nope"}, None, "UPRIVER_CONFIG")):
        with pytest.raises(InvalidArguments, match=rf"{origin} /nope: No such file"):
            gather({}, environment, file)
