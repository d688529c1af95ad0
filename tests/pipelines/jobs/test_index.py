"""The pipeline index: its options."""

import pytest

pytest.importorskip("pyspark", reason="the spark extra is not installed")

from upriver.errors import OptionError
from upriver.pipelines.core.registry import find
from upriver.pipelines.jobs.index import Index, is_file
from upriver.pipelines.targets.search.opensearch import OpenSearch
from upriver.pipelines.targets.search.solr import Solr


def test_what_an_index_may_be() -> None:
    assert find("index") is Index
    assert is_file("index.db")
    assert not is_file("solr+https://a:1/solr/x")
    for wrong in ("http://a/b", "elastic+http://a/b", "solr+ftp://a/b"):
        with pytest.raises(OptionError, match="opensearch\\+http://HOST:PORT/NAME"):
            Index.of(to=wrong)
    with pytest.raises(OptionError, match="option to = '/': this is a directory"):
        Index.of(to="/")
    for to, kind in (("elasticsearch+http://a/b", OpenSearch), ("solr+http://a/solr/b", Solr)):
        assert isinstance(Index.of(to=to).opened(), kind)


def test_a_password_is_not_shown() -> None:
    assert Index.of(to="solr+http://me:secret@a:1/solr/b").target == "solr+http://a:1/solr/b"
    assert Index.of(to="/tmp/file.db").target == "/tmp/file.db"
