"""Bytes out of text in its many forms."""

import pytest

from upriver.wire.hexdump import NotHexadecimal, parse, read_hexdump

PACKET = bytes.fromhex("805c00000000000000000000000000010000000000000000")

FORMS = {
    "digits": "805c00000000000000000000000000010000000000000000",
    "capitals": "805C00000000000000000000000000010000000000000000",
    "spaces": "80 5c 0000 00 00 0000 00000000 00000001 0000000000000000",
    "colons": ":".join(f"{byte:02x}" for byte in PACKET),
    "prefixes": " ".join(f"0x{byte:02x}" for byte in PACKET),
    "short prefixes": ", ".join(f"0x{byte:x}" for byte in PACKET),
    "escapes": "".join(f"\\x{byte:02x}" for byte in PACKET),
    "lines": "805c0000\n00000000\r\n00000000\n\n00000001\n0000000000000000\n",
    "comments": "# a noop\n805c0000 00000000 # header\n00000000 00000001 0000000000000000\n",
    "byte order mark": "\ufeff805c00000000000000000000000000010000000000000000",
    "xxd": (
        "00000000: 805c 0000 0000 0000 0000 0000 0000 0001  .\\..............\n"
        "00000010: 0000 0000 0000 0000                      ........\n"
    ),
    "xxd whose characters look like digits": (
        "00000000: 805c 0000 0000 0000 0000 0000 0000 0001  abcdef0123456789\n"
        "00000010: 0000 0000 0000 0000                      ........\n"
    ),
    "tcpdump": (
        "\t0x0000:  805c 0000 0000 0000 0000 0000 0000 0001\n"
        "\t0x0010:  0000 0000 0000 0000\n"
    ),
    "hexdump": (
        "00000000  80 5c 00 00 00 00 00 00  00 00 00 00 00 00 00 01  |.\\..............|\n"
        "00000010  00 00 00 00 00 00 00 00                           |........|\n"
        "00000018\n"
    ),
    "recording": (
        "# server: x\n"
        "   0.001 p      C>S 805c0000000000000000000000000001\n"
        "#                 REQ DCP_NOOP\n"
        "   0.002 p      S>C \n"
        "  12.345 p      S>C 0000000000000000\n"
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    assert read_hexdump(FORMS[form].encode()) == PACKET


@pytest.mark.parametrize("data", [PACKET, b"\x81abc", b"\x01\x00", b"\x07"])
def test_raw_bytes_are_recognised(data: bytes) -> None:
    assert read_hexdump(data) == data


@pytest.mark.parametrize("text", ["", "\n", "# nothing\n"])
def test_nothing(text: str) -> None:
    assert parse(text) == b""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("80 5", "an odd number of hexadecimal digits: 3"),
        ("80\n5g\n", "line 2: 'g' is not a hexadecimal digit"),
        ("Hello, world", "line 1: 'H' is not a hexadecimal digit"),
    ],
)
def test_wrong_text(text: str, why: str) -> None:
    with pytest.raises(NotHexadecimal, match=why):
        parse(text)


def test_neither_packets_nor_text() -> None:
    with pytest.raises(NotHexadecimal, match="neither packets nor text: it starts with 0xff"):
        read_hexdump(b"\xff\xd8\xff")
