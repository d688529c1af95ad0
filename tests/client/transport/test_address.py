"""Addresses, and what is said about texts that are none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.client.transport.address import Address, Endpoint
from upriver.errors import AddressError


@pytest.mark.parametrize(
    ("text", "endpoints"),
    [
        ("127.0.0.1:11210", [("127.0.0.1", 11210)]),
        ("localhost", [("localhost", 11210)]),
        ("a:1,b:2, c", [("a", 1), ("b", 2), ("c", 11210)]),
        ("[::1]:7", [("::1", 7)]),
        ("[fe80::1%eth0]", [("fe80::1%eth0", 11210)]),
    ],
)
def test_hosts_and_ports(text: str, endpoints: list[tuple[str, int]]) -> None:
    assert Address.parse(text) == Address(tuple(Endpoint(*each) for each in endpoints))


def test_a_url_has_everything() -> None:
    address = Address.parse("upriver://me%40home:p%2Fw:d@a:1,[::1]/my%20bucket?tls=on&ca=/etc/ca.pem")
    assert address.endpoints == (Endpoint("a", 1), Endpoint("::1", 11210))
    assert (address.user, address.password) == ("me@home", "p/w:d")
    assert (address.bucket, address.tls, address.ca) == ("my bucket", True, "/etc/ca.pem")
    assert "p/w" not in str(address)
    assert "p/w" not in repr(address)
    assert str(address) == "upriver://me@home@a:1,[::1]:11210/my bucket"


def test_a_url_may_be_short() -> None:
    assert Address.parse("upriver://a") == Address((Endpoint("a", 11210),))
    assert Address.parse("upriver://a?ca=x").tls
    assert not Address.parse("upriver://a?ca=x&tls=off").tls
    assert Address.parse("upriver://me@a").password is None
    assert Address.parse("a").with_login("me", "pw") == Address.parse("upriver://me:pw@a")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "a host is missing"),
        ("a:1,", "a host is missing"),
        ("a:", "invalid port in 'a:'; use a number from 1 to 65535"),
        ("a:0", "invalid port in"),
        ("a:65536", "invalid port in"),
        ("a:x", "invalid port in"),
        ("::1:11210", "in brackets"),
        ("a b", "invalid host and port"),
        ("11210", "'11210' is a number, not a host"),
        ("a:1,7:2", "'7' is a number"),
        ("http://a", "unknown scheme 'http'; use upriver://"),
        ("upriver://@a", "the user before the @ is missing"),
        ("upriver://a?tsl=on", "unknown setting tsl; use tls, ca or keepalive_s"),
        ("upriver://a?tls=maybe", "on or off"),
        ("upriver://", "a host is missing"),
    ],
)
def test_what_is_no_address(text: str, said: str) -> None:
    with pytest.raises(AddressError) as caught:
        Address.parse(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_error_does_not_tell_the_password() -> None:
    with pytest.raises(AddressError) as caught:
        Address.parse("upriver://me:secret@a:x/b")
    assert "secret" not in str(caught.value)


@given(st.text())
def test_any_text_is_an_address_or_a_clear_error(text: str) -> None:
    try:
        address = Address.parse(text)
    except AddressError:
        return
    assert all(1 <= each.port <= 65535 and each.host for each in address.endpoints)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.1.2.3", True), ("localhost", True), ("::1", True), ("10.0.0.1", False)],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert Endpoint(host, 1).is_loopback is loopback


@pytest.mark.parametrize(
    "text",
    [
        "a:1",
        "a:1,[::1]:2",
        "upriver://a:1/b",
        "upriver://me@a:1",
        "upriver://m%2Fe:s%40%3A%2Fcret@a:1,b:2/the%20bucket?ca=/x/ca.pem",
    ],
)
def test_an_address_as_text_is_complete(text: str) -> None:
    address = Address.parse(text)
    assert Address.parse(address.as_text()) == address
