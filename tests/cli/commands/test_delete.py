"""``upriver delete``."""

import json

from tests.support.command_runner import Run


def test_a_key_is_gone(run: Run) -> None:
    cas = json.loads(run("set", "fruit", "apple", "--json").stdout)["cas"]
    assert run("delete", "fruit", "--cas", str(cas + 1)).exit_code == 1
    deleted = run("delete", "fruit", "--cas", str(cas), "--json")
    assert deleted.exit_code == 0
    assert json.loads(deleted.stdout)["seqno"] == 2
    assert run("get", "fruit").exit_code == 1
    again = run("delete", "fruit")
    assert (again.exit_code, again.stderr) == (1, "upriver delete: no such key: 'fruit'\n")
