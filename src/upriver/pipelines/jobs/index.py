"""The pipeline index: a full-text index of all documents."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from upriver.errors import OptionError
from upriver.options import as_seconds, as_text, option
from upriver.pipelines.apply.keeping import Keeping, KeepingOptions
from upriver.pipelines.targets.search.http_requests import HttpRequests
from upriver.pipelines.targets.search.opensearch import OpenSearch
from upriver.pipelines.targets.search.solr import Solr
from upriver.pipelines.targets.search.sqlite_index import Hit, SqliteIndex, search
from upriver.pipelines.targets.target import Target

#: The product names in URLs, before the scheme of HTTP.
SCHEMES: Final[dict[str, type[OpenSearch] | type[Solr]]] = {
    "opensearch": OpenSearch,
    "elasticsearch": OpenSearch,
    "solr": Solr,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexOptions(KeepingOptions):
    """The options of index."""

    to: str = option(
        "index.db",
        as_text,
        "file of the index, or URL of an index or collection",
        "FILE, opensearch+http://… or solr+http://…",
    )
    wait: float = option(30.0, as_seconds, "how long a batch waits for a server that is down or busy")

    def __post_init__(self) -> None:
        super(IndexOptions, self).__post_init__()
        if is_file(self.to) and Path(self.to).is_dir():
            raise OptionError("to", self.to, "this is a directory: give a file")


class Index(Keeping):
    """Keeps a full-text index of the documents current."""

    name = "index"
    options_type = IndexOptions
    options: IndexOptions

    @property
    def target(self) -> str:
        """The absolute path of the file, or the URL without its password."""
        if is_file(self.options.to):
            return str(Path(self.options.to).absolute())
        parts = urlsplit(self.options.to)
        return self.options.to if parts.password is None else urlunsplit(parts._replace(netloc=_without_login(parts)))

    def opened(self) -> Target:
        """Open the index, and create it if necessary."""
        if is_file(self.options.to):
            return SqliteIndex(Path(self.options.to))
        return served(self.options.to, self.options.wait)


def _without_login(parts: object) -> str:
    return str(getattr(parts, "netloc", "")).rpartition("@")[2]


def is_file(to: str) -> bool:
    """Whether the index is a file."""
    if "://" not in to:
        return True
    product, plus, transport = to.partition("://")[0].partition("+")
    if product not in SCHEMES or not plus or transport not in ("http", "https"):
        known = ", ".join(f"{name}+http://HOST:PORT/NAME" for name in SCHEMES)
        raise OptionError("to", to, f"it must be a file or one of {known} (or https)")
    return False


def served(to: str, patience_s: float) -> OpenSearch | Solr:
    """The index on a server."""
    product, _, rest = to.partition("+")
    return SCHEMES[product](HttpRequests(rest, patience_s=patience_s))


def search_index(to: str, query: str, limit: int, marks: tuple[str, str] = ("[", "]")) -> list[Hit]:
    """The best hits in an index."""
    if is_file(to):
        return search(Path(to), query, limit, marks)
    target = served(to, 10.0)
    try:
        return target.search(query, limit, marks)
    finally:
        target.close()
