"""Servers that answer as OpenSearch and Solr document it, check what they are asked, and fail when they are told to.

They keep documents with versions, so that what a client does to them can be compared with what it should have done.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Answer = tuple[int, Any]


class FakeSearchServer:
    """A server on a free port; ``trouble`` is asked first about every request and may answer instead."""

    def __init__(self) -> None:
        self.trouble: list[Callable[[str, str, bytes], Answer | None]] = []
        self.requests: list[tuple[str, str]] = []
        self.wrong: list[str] = []
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, answer = outer._answer(self.command, self.path, body, self.headers.get("Content-Type", ""))
                if status == 0:  # cut off without an answer
                    self.close_connection = True
                    return
                data = b"" if answer is None else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                if status == 429:
                    self.send_header("Retry-After", "0")
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, method: str, path: str, body: bytes, kind: str) -> Answer:
        with self._lock:
            self.requests.append((method, path))
            for trouble in self.trouble:
                if (answer := trouble(method, path, body)) is not None:
                    return answer
            try:
                return self.serve(method, path, body, kind)
            except Exception as error:
                self.wrong.append(f"{method} {path}: {error!r}")
                return 400, {"error": {"reason": repr(error), "msg": repr(error)}, "status": 400}

    def serve(self, method: str, path: str, body: bytes, kind: str) -> Answer:
        raise NotImplementedError


class FakeOpenSearch(FakeSearchServer):
    """One index of OpenSearch."""

    def __init__(self) -> None:
        super().__init__()
        self.exists = False
        self.mapping: dict[str, Any] = {}
        self.documents: dict[str, tuple[int, dict[str, Any]]] = {}
        #: Versions of deleted documents, which count for a while.
        self.deleted: dict[str, int] = {}
        #: Ids that are refused, with the status and how often.
        self.refused: dict[str, list[int]] = {}

    def serve(self, method: str, path: str, body: bytes, kind: str) -> Answer:
        parts = urlsplit(path)
        name, _, rest = parts.path.removeprefix("/").partition("/")
        assert name == "shop"
        if not rest:
            return self._index(method, body)
        if not self.exists:
            return 404, {"error": {"type": "index_not_found_exception"}, "status": 404}
        match method, rest:
            case "GET", "_mapping":
                return 200, {name: {"mappings": self.mapping}}
            case "PUT", "_mapping":
                self.mapping |= json.loads(body)
                return 200, {"acknowledged": True}
            case "POST", "_bulk":
                assert kind == "application/x-ndjson"
                assert body.endswith(b"\n")
                return 200, self._bulk(body.decode().splitlines())
            case "POST", "_refresh":
                return 200, {"_shards": {"failed": 0}}
            case "POST", "_delete_by_query":
                return 200, self._delete_by_query(json.loads(body))
            case "POST", "_search":
                return 200, self._search(json.loads(body))
        raise AssertionError("no such request")

    def _index(self, method: str, body: bytes) -> Answer:
        if method == "DELETE":
            if not self.exists:
                return 404, {"error": {"type": "index_not_found_exception"}, "status": 404}
            self.exists, self.mapping = False, {}
            self.documents.clear()
            self.deleted.clear()
            return 200, {"acknowledged": True}
        assert method == "PUT"
        if self.exists:
            return 400, {"error": {"type": "resource_already_exists_exception"}, "status": 400}
        self.exists, self.mapping = True, json.loads(body)["mappings"]
        return 200, {"acknowledged": True, "index": "shop"}

    def _bulk(self, lines: list[str]) -> Any:
        items = []
        rest = iter(lines)
        for line in rest:
            ((action, head),) = json.loads(line).items()
            source = json.loads(next(rest)) if action == "index" else None
            items.append({action: self._one(head, source)})
        return {"took": 1, "errors": any(next(iter(item.values()))["status"] >= 300 for item in items), "items": items}

    def _one(self, head: dict[str, Any], source: dict[str, Any] | None) -> Any:
        assert head["version_type"] == "external_gte"
        assert 0 <= head["version"] < 2**63
        name = head["_id"]
        assert 0 < len(name.encode()) <= 512
        if self.refused.get(name):
            status = self.refused[name].pop(0)
            return {"_id": name, "status": status, "error": {"type": "refused", "reason": "on purpose"}}
        held = self.documents.get(name, (self.deleted.get(name, -1), None))
        if head["version"] < held[0]:
            return {"_id": name, "status": 409, "error": {"type": "version_conflict_engine_exception"}}
        if source is None:
            found = self.documents.pop(name, None)
            self.deleted[name] = head["version"]
            return {"_id": name, "status": 200 if found else 404, "result": "deleted" if found else "not_found"}
        self.documents[name] = (head["version"], source)
        return {"_id": name, "status": 201, "result": "created"}

    def _delete_by_query(self, body: Any) -> Any:
        term, older = body["query"]["bool"]["filter"]
        vbucket, limit = term["term"]["vbucket"], older["range"]["generation"]["lt"]
        found = [
            name
            for name, (_, source) in self.documents.items()
            if source["vbucket"] == vbucket and source["generation"] < limit
        ]
        for name in found:
            self.deleted[name] = self.documents.pop(name)[0] + 1
        return {"deleted": len(found), "version_conflicts": 0, "failures": []}

    def _search(self, body: Any) -> Any:
        wanted = body["query"]["simple_query_string"]
        assert set(wanted["fields"]) == {"text", "key"}
        words = wanted["query"].lower().split()
        tags = body["highlight"]["pre_tags"][0], body["highlight"]["post_tags"][0]
        hits = []
        for name, (_, source) in sorted(self.documents.items()):
            text = source["text"]
            if all(word in f"{text} {source['key']}".lower().split() for word in words):
                marked = " ".join(f"{tags[0]}{w}{tags[1]}" if w.lower() in words else w for w in text.split())
                shown = {field: source[field] for field in body["_source"] if field in source}
                hits.append({"_id": name, "_score": 1.5, "_source": shown, "highlight": {"text": [marked]}})
        return {"hits": {"hits": hits[: body["size"]]}}


class FakeSolr(FakeSearchServer):
    """One collection of Solr; updates become visible with a commit."""

    def __init__(self) -> None:
        super().__init__()
        self.documents: dict[str, dict[str, Any]] = {}
        self._pending: dict[str, dict[str, Any]] = {}

    def serve(self, method: str, path: str, body: bytes, kind: str) -> Answer:
        parts = urlsplit(path)
        asked = {name: values[0] for name, values in parse_qs(parts.query).items()}
        match method, parts.path:
            case "POST", "/solr/shop/update":
                assert kind == "application/json"
                self._update(json.loads(body))
                if asked["commit"] == "true":
                    self.documents = dict(self._pending)
                return 200, {"responseHeader": {"status": 0}}
            case "GET", "/solr/shop/select":
                return 200, self._select(asked)
        raise AssertionError("no such request")

    def _update(self, body: Any) -> None:
        if isinstance(body, list):
            for document in body:
                assert all(re.search(r"^id$|_(s|txt|i)$", name) for name in document)
                self._pending[document["id"]] = document
        elif isinstance(body["delete"], list):
            for name in body["delete"]:
                self._pending.pop(name, None)
        elif body["delete"]["query"] == "*:*":
            self._pending.clear()
        else:
            field, _, number = body["delete"]["query"].partition(":")
            assert field == "vbucket_i"
            self._pending = {n: d for n, d in self._pending.items() if d.get("vbucket_i") != int(number)}

    def _select(self, asked: dict[str, str]) -> Any:
        assert asked["wt"] == "json"
        if asked["q"].startswith('id:"'):
            found = [each for name, each in self.documents.items() if f'id:"{name}"' == asked["q"]]
            return {"response": {"docs": found}}
        words = asked["q"].lower().split()
        assert (asked["defType"], asked["q.op"]) == ("edismax", "AND")
        found = [
            each | {"score": 2.0}
            for each in self.documents.values()
            if "vbucket_i" in each and all(word in each["text_txt"].lower().split() for word in words)
        ]
        before, behind = asked["hl.simple.pre"], asked["hl.simple.post"]
        marked = {each["id"]: {"text_txt": [f"{before}{words[0]}{behind}"]} for each in found}
        return {"response": {"docs": found[: int(asked["rows"])]}, "highlighting": marked}

    def restart(self) -> None:
        """What was not committed is gone."""
        self._pending = dict(self.documents)


@contextmanager
def served(kind: type[FakeSearchServer]) -> Iterator[Any]:
    """Such a server for a test; requests that it did not understand fail the test."""
    server = kind()
    try:
        yield server
    finally:
        server.close()
    assert server.wrong == []
