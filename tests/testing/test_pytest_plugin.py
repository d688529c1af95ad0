"""The fixture, as a project sees it that tests its own consumer."""

import pytest

from tests.support.node_process import Client
from upriver.node.embedded import EmbeddedNode

pytest_plugins = ["pytester"]

#: The tests of another project. They do not name the plugin: installing Upriver is enough.
TESTS = """
    import socket
    import pytest

    pytestmark = pytest.mark.upriver(bucket="module")
    seen = []

    def noop(node):
        with socket.create_connection((node.host, node.port), 30) as plain:
            plain.sendall(bytes.fromhex("800a") + bytes(22))
            return plain.recv(24)[:2]

    @pytest.mark.parametrize("round", range(3))
    def test_each_has_its_own(upriver_node, round):
        assert noop(upriver_node) == bytes.fromhex("810a")
        assert upriver_node.call(len, upriver_node.bucket) == 64
        assert upriver_node.address == f"127.0.0.1:{upriver_node.port}"
        seen.append(upriver_node)

    def test_the_others_are_closed():
        for node in seen:
            with pytest.raises(OSError):
                noop(node)

    @pytest.mark.upriver(vbuckets=8)
    class TestMarkers:
        @pytest.mark.upriver(vbuckets=2)
        def test_the_closest_wins(self, upriver_node):
            assert upriver_node.call(len, upriver_node.bucket) == 2
            assert upriver_node.node.options.bucket == "module"

    @pytest.mark.upriver(vbuckets=3)
    def test_bad_value(upriver_node):
        pass

    @pytest.mark.upriver(vbukets=4)
    def test_bad_name(upriver_node):
        pass

    @pytest.mark.upriver(4)
    def test_no_name(upriver_node):
        pass
"""

#: Tests of somebody who has Upriver installed and tests something else.
OTHERS = """
    import sys

    def test_it(pytestconfig):
        assert "upriver.testing.pytest_plugin" in sys.modules
        heavy = {"asyncio", "upriver.engine", "upriver.wire", "upriver.node.server", "pyarrow", "upriver.scram", "lmdb"}
        assert not heavy & set(sys.modules)
        assert any(line.startswith("upriver(**options):") for line in pytestconfig.getini("markers"))
"""


def test_a_test_gets_a_node_of_its_own(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-W", "error", "--strict-markers")
    result.assert_outcomes(passed=5, errors=3)
    for complaint in (
        "*vbuckets = 3: it must be a power of two up to 1024*",
        "*unexpected keyword argument 'vbukets'*",
        "*pytest.mark.upriver takes options by name*",
    ):
        result.stdout.fnmatch_lines([complaint])


def test_other_tests_do_not_wait_for_a_node(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(OTHERS)
    pytester.runpytest_subprocess("-p", "no:cacheprovider", "-W", "error").assert_outcomes(passed=1)


@pytest.mark.upriver(vbuckets=2)
def test_it_serves_our_own_tests_too(upriver_node: EmbeddedNode) -> None:
    with Client(upriver_node.port) as client:
        client.set(b"key", b"value", vbucket=1)
        assert client.get(b"key", vbucket=1) == b"value"
