"""JSON over HTTP to a server that is busy, down, cut off or wrong."""

import socket
from typing import Any

import pytest

from tests.support.search_servers import FakeSearchServer, served
from upriver.errors import HttpRefused, OptionError, Unreachable
from upriver.pipelines.targets.search.http_requests import HttpRequests


class Echo(FakeSearchServer):
    """Says what it was asked."""

    def serve(self, method: str, path: str, body: bytes, kind: str) -> tuple[int, Any]:
        return 200, {"method": method, "path": path, "body": body.decode(), "kind": kind}


def requests(server: FakeSearchServer, **options: Any) -> HttpRequests:
    return HttpRequests(f"http://127.0.0.1:{server.port}/base/", sleep=lambda _: None, **options)


def test_a_request_has_path_body_and_kind() -> None:
    with served(Echo) as server:
        asking = requests(server)
        assert asking.ask("PUT", "/x", {"a": "ü"}) == (
            200, {"method": "PUT", "path": "/base/x", "body": '{"a": "ü"}', "kind": "application/json"}
        )  # fmt: skip
        assert asking.ask("POST", "", lines=b"{}\n")[1]["kind"] == "application/x-ndjson"
        asking.close()


@pytest.mark.parametrize("status", [429, 502, 503, 504, 0])
def test_what_is_refused_for_now_is_asked_again(status: int) -> None:
    with served(Echo) as server:
        left = [status] * 3
        server.trouble.append(lambda *_: (left.pop(), None) if left else None)
        asking = requests(server)
        assert asking.ask("GET", "/x")[0] == 200
        assert len(server.requests) == 4
        asking.close()


def test_what_is_refused_for_good_is_told_at_once() -> None:
    with served(Echo) as server:
        server.trouble.append(lambda *_: (403, {"error": "no"}))
        asking = requests(server)
        with pytest.raises(HttpRefused, match=r'/base: GET /x returned status 403: \{"error": "no"\}'):
            asking.ask("GET", "/x")
        assert len(server.requests) == 1
        assert asking.ask("GET", "/x", accept=(403,)) == (403, {"error": "no"})
        asking.close()


def test_patience_has_an_end() -> None:
    with served(Echo) as server:
        server.trouble.append(lambda *_: (503, {"error": "starting"}))
        asking = requests(server, patience_s=0.05)
        with pytest.raises(Unreachable, match="503"):
            asking.ask("GET", "/x")
        asking.close()


def test_a_closed_port_and_a_late_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        asking = HttpRequests(f"http://127.0.0.1:{port}/x", patience_s=0.05, timeout_s=0.05)
        with pytest.raises(Unreachable, match="timed out"):
            asking.ask("GET", "")
    with pytest.raises(Unreachable):
        HttpRequests(f"http://127.0.0.1:{port}/x", patience_s=0.05).ask("GET", "")


def test_a_login_goes_along_and_is_not_shown() -> None:
    asking = HttpRequests("https://me:se%40cret@example.invalid:9200/shop")
    assert asking.shown == "https://example.invalid:9200/shop"
    assert asking._headers["Authorization"] == "Basic bWU6c2VAY3JldA=="
    with pytest.raises(OptionError, match="http://HOST:PORT/NAME"):
        HttpRequests("ftp://x/y")
