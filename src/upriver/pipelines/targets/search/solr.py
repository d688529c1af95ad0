"""Solr as the index: JSON updates that become visible together, with the commit at the end of a batch.

Solr has no external versions, so requests are sent one after the other; the last one contains the progress as a
separate document. All requests can be repeated. Field names have the endings of Solr's default schema.
"""

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import quote, urlencode

from upriver.errors import HttpRefused, TargetRefused
from upriver.pipelines.targets.search.http_requests import HttpRequests
from upriver.pipelines.targets.search.opensearch import id_of
from upriver.pipelines.targets.search.sqlite_index import Hit
from upriver.pipelines.targets.search.texts import text_of
from upriver.pipelines.targets.target import Target, TargetProgress, Work

#: The id of the progress document.
PROGRESS: Final = "upriver!progress"
#: Maximum number of documents in a request.
ROWS_MAX: Final = 1000


class Solr(Target):
    """The collection of a URL: ``http://host:8983/solr/name``."""

    def __init__(self, requests: HttpRequests) -> None:
        self._requests = requests
        self._progress: TargetProgress | None = None

    def progress(self) -> TargetProgress:
        """The progress of the index."""
        if self._progress is None:
            found = self._select({"q": f'id:"{PROGRESS}"', "fl": "progress_s", "rows": "1"})["docs"]
            self._progress = TargetProgress.of_text(_one(found[0]["progress_s"])) if found else TargetProgress()
        return self._progress

    def commit(self, work: Work) -> None:
        """Send all updates, and with the last one the progress and the commit."""
        progress = self.progress().after(work)
        if work.clear_all:
            self._update({"delete": {"query": "*:*"}})
        for number in sorted(work.cleared):
            self._update({"delete": {"query": f"vbucket_i:{number}"}})
        stored, gone = _split(work)
        for at in range(0, len(gone), ROWS_MAX):
            self._update({"delete": gone[at : at + ROWS_MAX]})
        for at in range(0, len(stored), ROWS_MAX):
            self._update(stored[at : at + ROWS_MAX])
        self._update([{"id": PROGRESS, "progress_s": progress.as_text()}], commit=True)
        self._progress = progress

    def close(self) -> None:
        """Close the connection."""
        self._requests.close()

    def search(self, query: str, limit: int, marks: tuple[str, str]) -> list[Hit]:
        """The best hits for a query in the syntax of edismax."""
        before, behind = marks
        asked = {"q": query, "defType": "edismax", "qf": "text_txt key_txt", "rows": str(limit), "fl": "*,score"}
        asked |= {"q.op": "AND", "fq": "vbucket_i:[* TO *]"}
        asked |= {"hl": "true", "hl.fl": "text_txt", "hl.snippets": "1", "hl.simple.pre": before}
        answer = self._ask(asked | {"hl.simple.post": behind})
        marked = answer.get("highlighting", {})
        return [
            Hit(
                urlsafe_b64decode(_one(each["key_s"])),
                " … ".join(marked.get(each["id"], {}).get("text_txt", [])),
                each["score"],
            )
            for each in answer["response"]["docs"]
        ]

    def _select(self, asked: dict[str, str]) -> Any:
        return self._ask(asked)["response"]

    def _ask(self, asked: dict[str, str]) -> Any:
        _, answer = self._requests.ask("GET", f"/select?{urlencode(asked | {'wt': 'json'}, quote_via=quote)}")
        return answer

    def _update(self, body: Any, *, commit: bool = False) -> None:
        try:
            self._requests.ask("POST", f"/update?commit={str(commit).lower()}&wt=json", body)
        except HttpRefused as error:
            count = len(body) if isinstance(body, list) else 1
            raise TargetRefused(self._requests.shown, count, [_message(error)]) from None


def _split(work: Work) -> tuple[list[dict[str, Any]], list[str]]:
    stored: list[dict[str, Any]] = []
    gone: list[str] = []
    for event, vbucket, key, value in _rows(work):
        name = id_of(vbucket, key)
        if event == "mutation":
            words = key.decode(errors="replace")
            packed = urlsafe_b64encode(key).decode()
            document = {"id": name, "key_s": packed, "key_txt": words, "text_txt": text_of(value)}
            stored.append(document | {"vbucket_i": vbucket})
        else:
            gone.append(name)
    return stored, gone


def _rows(work: Work) -> Iterator[tuple[str, int, bytes, bytes]]:
    columns = (work.rows.column(name).to_pylist() for name in ("event", "vbucket", "key", "value"))
    yield from zip(*columns, strict=True)


def _message(error: HttpRefused) -> str:
    try:
        return str(json.loads(error.answer)["error"]["msg"])
    except (ValueError, KeyError, TypeError):
        return str(error)


def _one(value: Any) -> str:
    """A field that may be a list of one."""
    return str(value[0] if isinstance(value, list) else value)
