"""OpenSearch and Elasticsearch as the index: the bulk API with external versions.

The id of a document is its vbucket and key, and its version is (generation, seqno): a late or repeated request cannot
overwrite a newer version. The generation of a vbucket grows when it is read from the node again, so that these
documents win over all earlier ones. Generations and progress are in the ``_meta`` of the index's mapping. There are no
transactions: the documents are written first and the progress last, so interrupted work is repeated.
"""

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from upriver.errors import TargetRefused, Unreachable
from upriver.pipelines.targets.search.http_requests import HttpRequests
from upriver.pipelines.targets.search.sqlite_index import Hit
from upriver.pipelines.targets.search.texts import document_of, text_of
from upriver.pipelines.targets.target import Target, TargetProgress, Work

#: Limits of one bulk request.
BULK_BYTES_MAX: Final = 5 * 1024 * 1024
BULK_ROWS_MAX: Final = 5000
#: Number of refused documents in an error.
SAMPLES_MAX: Final = 5
ATTEMPTS_MAX: Final = 8
#: The longest id that servers accept.
ID_BYTES_MAX: Final = 512
_SEQNO_BITS: Final = 46
_MAPPING: Final = {
    "dynamic": False,
    "properties": {
        "key": {"type": "text", "fields": {"raw": {"type": "keyword", "ignore_above": 512}}},
        "text": {"type": "text"},
        "vbucket": {"type": "integer"},
        "generation": {"type": "integer"},
        "document": {"type": "object", "enabled": False},
    },
}


class _Action(NamedTuple):
    """One action of a bulk request, with its document."""

    id: str
    data: bytes


class OpenSearch(Target):
    """The index of a URL: ``http://host:9200/name``."""

    def __init__(self, requests: HttpRequests) -> None:
        self._requests = requests
        self._meta: dict[str, Any] | None = None

    def progress(self) -> TargetProgress:
        """The progress of the index."""
        meta = self._known()
        return TargetProgress.of_text(meta["progress"]) if "progress" in meta else TargetProgress()

    def commit(self, work: Work) -> None:
        """Write all documents, then the progress."""
        progress = self.progress().after(work)
        if work.clear_all:
            self._recreate()
        generations: dict[str, int] = dict(self._known().get("generations", {}))
        for number in work.cleared:
            generations[str(number)] = generations.get(str(number), 0) + 1
        if work.cleared:
            # Before the documents: if this attempt is interrupted, the next one needs higher versions.
            self._remember({**self._known(), "generations": generations})
        self._bulk(_actions(work, generations))
        for number in work.cleared:
            self._drop(number, generations[str(number)])
        self._remember({"progress": progress.as_text(), "generations": generations})

    def close(self) -> None:
        """Close the connection."""
        self._requests.close()

    def search(self, query: str, limit: int, marks: tuple[str, str]) -> list[Hit]:
        """The best hits for a query string."""
        before, behind = marks
        highlight = {"pre_tags": [before], "post_tags": [behind], "fields": {"text": {"number_of_fragments": 1}}}
        asked = {
            "query": {"simple_query_string": {"query": query, "fields": ["text", "key"], "default_operator": "and"}},
            "size": limit,
            "highlight": highlight,
            "_source": ["key", "raw_key"],
        }
        _, answer = self._requests.ask("POST", "/_search", asked)
        return [_hit(each) for each in answer["hits"]["hits"]]

    # Metadata of the index

    def _known(self) -> dict[str, Any]:
        if self._meta is None:
            status, answer = self._requests.ask("GET", "/_mapping", accept=(404,))
            if status == 404:
                self._recreate()
            else:
                mapping = next(iter(answer.values()))["mappings"]
                self._meta = dict(mapping.get("_meta", {}).get("upriver", {}))
        assert self._meta is not None
        return self._meta

    def _recreate(self) -> None:
        self._requests.ask("DELETE", "", accept=(404,))
        status, answer = self._requests.ask("PUT", "", {"mappings": _MAPPING}, accept=(400,))
        if status == 400 and "resource_already_exists" not in json.dumps(answer):
            raise TargetRefused(self._requests.shown, 1, [json.dumps(answer)[:300]])
        self._meta = {}

    def _remember(self, meta: dict[str, Any]) -> None:
        self._requests.ask("PUT", "/_mapping", {"_meta": {"upriver": meta}})
        self._meta = meta

    # Documents

    def _bulk(self, actions: Iterator[_Action]) -> None:
        for group in _groups(actions):
            left = {action.id: action for action in group}
            for _ in range(ATTEMPTS_MAX):
                lines = b"".join(action.data for action in left.values())
                _, answer = self._requests.ask("POST", "/_bulk", lines=lines)
                left, failed = _unfinished(left, answer)
                if failed:
                    raise TargetRefused(self._requests.shown, len(failed), failed[:SAMPLES_MAX])
                if not left:
                    break
                self._requests.pause()
            else:
                raise Unreachable(self._requests.shown, f"it is too busy for {len(left)} documents")

    def _drop(self, vbucket: int, generation: int) -> None:
        """Delete the documents of earlier generations of a vbucket."""
        self._requests.ask("POST", "/_refresh")
        older = [{"term": {"vbucket": vbucket}}, {"range": {"generation": {"lt": generation}}}]
        path = "/_delete_by_query?conflicts=proceed&refresh=true"
        for _ in range(ATTEMPTS_MAX):
            _, answer = self._requests.ask("POST", path, {"query": {"bool": {"filter": older}}})
            if not answer.get("version_conflicts") and not answer.get("failures"):
                return
            self._requests.pause()
        raise TargetRefused(self._requests.shown, 1, [f"vbucket {vbucket}: {json.dumps(answer)[:200]}"])


def _actions(work: Work, generations: dict[str, int]) -> Iterator[_Action]:
    columns = (work.rows.column(name).to_pylist() for name in ("event", "vbucket", "key", "value", "seqno", "cas"))
    for event, vbucket, key, value, seqno, cas in zip(*columns, strict=True):
        generation = generations.get(str(vbucket), 0)
        name = id_of(vbucket, key)
        version = (generation << _SEQNO_BITS) | seqno
        head = {"_id": name, "version": version, "version_type": "external_gte"}
        if event != "mutation":
            yield _Action(name, _line({"delete": head}))
            continue
        document: dict[str, Any] = {
            "key": key.decode(errors="replace"),
            "text": text_of(value),
            "vbucket": vbucket,
            "generation": generation,
            "cas": str(cas),
        }
        if "\ufffd" in document["key"]:
            document["raw_key"] = urlsafe_b64encode(key).decode()
        found = document_of(value)
        if found is not None:
            document["document"] = found
        yield _Action(name, _line({"index": head}) + _line(document))


def id_of(vbucket: int, key: bytes) -> str:
    """The id of a document: readable if the key is, and never too long for a server."""
    name = f"{vbucket}:{quote(key, safe='')}"
    if len(name) <= ID_BYTES_MAX:
        return name
    return f"{vbucket}={urlsafe_b64encode(key).decode()}"


def _line(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace") + b"\n"


def _groups(actions: Iterable[_Action]) -> Iterator[list[_Action]]:
    group: list[_Action] = []
    size = 0
    for action in actions:
        if group and (size + len(action.data) > BULK_BYTES_MAX or len(group) == BULK_ROWS_MAX):
            yield group
            group, size = [], 0
        group.append(action)
        size += len(action.data)
    if group:
        yield group


def _unfinished(left: dict[str, _Action], answer: Any) -> tuple[dict[str, _Action], list[str]]:
    """The actions to send again, and the permanently refused ones."""
    again: dict[str, _Action] = {}
    failed: list[str] = []
    if not answer["errors"]:
        return again, failed
    for item in answer["items"]:
        ((kind, told),) = item.items()
        status = told["status"]
        # After a version conflict the index has this version or a newer one; a missing document is deleted already.
        if status < 300 or status == 409 or (kind == "delete" and status == 404):
            continue
        if status in (429, 502, 503, 504):
            again[told["_id"]] = left[told["_id"]]
        else:
            failed.append(f"{told['_id']}: {json.dumps(told.get('error', status))[:200]}")
    return again, failed


def _hit(found: Any) -> Hit:
    source = found["_source"]
    key = urlsafe_b64decode(source["raw_key"]) if "raw_key" in source else source["key"].encode()
    snippet = " … ".join(found.get("highlight", {}).get("text", []))
    return Hit(key, snippet, found["_score"])
