"""``upriver set``."""

import json

from tests.support.command_runner import Run


def test_flags_and_place(run: Run) -> None:
    first = run("set", "fruit", "apple", "--json", "--flags", "5")
    assert first.exit_code == 0
    written = json.loads(first.stdout)
    assert written["seqno"] == 1
    assert written["vbucket"] in range(8)
    assert written["cas"] > 0
    assert json.loads(run("get", "--json", "fruit").stdout) == {
        "key": "fruit", "value": "apple", "flags": 5, "cas": written["cas"],
    }  # fmt: skip


def test_it_is_silent(run: Run) -> None:
    result = run("set", "fruit", "apple")
    assert (result.exit_code, result.output) == (0, "")


def test_another_cas(run: Run) -> None:
    run("set", "fruit", "apple")
    result = run("set", "fruit", "pear", "--cas", "12345")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert run("get", "fruit").stdout == "apple"


def test_what_makes_no_sense(run: Run) -> None:
    for arguments in (("fruit",), ("fruit", "apple", "--flags", "-1"), ("fruit", "apple", "--expiry", "soon")):
        result = run("set", *arguments)
        assert result.exit_code == 2
        assert result.stderr.startswith("upriver set: ")
        assert result.stderr.count("\n") == 1
