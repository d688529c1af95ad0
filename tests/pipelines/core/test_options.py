"""Options of pipelines: the same from a terminal, a file and Python."""

import dataclasses

import pytest

from upriver.client import SyncKvClient
from upriver.client.transport.address import Address
from upriver.errors import NotSupported, OptionError
from upriver.node import start
from upriver.pipelines.core.failures import is_temporary
from upriver.pipelines.core.options import JobOptions, PipelineOptions, connection, shown_name
from upriver.spark.options import ReadOptions


def test_the_first_draft_needs_the_port_of_its_listener() -> None:
    """Without it the pipeline fails, and is not tried again: it would never see a deletion."""
    pytest.importorskip("pyspark", reason="the spark extra is not installed")
    from tests.support.spark_driver import read_batch

    with start(vbuckets=4, listen="127.0.0.1:0,dialect=upr_draft1") as node:
        with SyncKvClient(node.address) as kv:
            kv.set("fruit", "apple")
            kv.delete("fruit")
        given = {"from": node.address, "dialect": "upr_draft1"}
        with pytest.raises(NotSupported, match="--stream-port") as caught:
            read_batch(None, **PipelineOptions.read(given).reader_options())
        assert not is_temporary(caught.value)
        given["stream-port"] = str(node.node.listen_addresses[1].port)
        rows = read_batch(None, **PipelineOptions.read(given).reader_options())
        assert [row["key"] for row in rows] == [b"fruit"]


def test_a_dialect_without_seqnos_is_not_offered() -> None:
    (dialect,) = (field for field in dataclasses.fields(PipelineOptions) if field.name == "dialect")
    assert "tap" not in dialect.metadata["values"]
    with pytest.raises(OptionError, match="dialect = 'tap': it must be one of dcp, upr"):
        PipelineOptions.read({"dialect": "tap"})


def test_options_are_read_however_they_are_spelled() -> None:
    typed = PipelineOptions.read({"from": "a:1", "key-prefix": "user:", "max-rows": "10", "vbuckets": "0-2,7"})
    in_a_file = PipelineOptions.read({"from": "a:1", "key_prefix": "user:", "max_rows": 10, "vbuckets": [0, 1, 2, 7]})
    in_python = PipelineOptions.read({"from": Address.parse("a:1"), "key_prefix": "user:", "max_rows": 10}
                                     | {"vbuckets": (0, 1, 2, 7)})  # fmt: skip
    assert typed == in_a_file == in_python
    assert typed.vbuckets == (0, 1, 2, 7)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"key-prefiks": "x"}, "did you mean key-prefix"),
        ({"from": "nowhere:port"}, "option from = 'nowhere:port': it must be a valid address: invalid port"),
        ({"max_rows": "0"}, "option max-rows = '0': it must be a whole number from 1"),
        ({"start": "soon"}, "it must be one of earliest, latest"),
        ({"fail_on_data_loss": "perhaps"}, "it must be true or false"),
    ],
)
def test_what_makes_no_sense_is_one_clear_error(given: dict[str, str], complaint: str) -> None:
    with pytest.raises(OptionError, match=complaint):
        PipelineOptions.read(given)


def test_the_source_understands_what_it_is_told() -> None:
    options = PipelineOptions.read({"from": "upriver://ann:secret@a:1,b:2/beer?tls=on&ca=/ca.pem", "key-prefix": "u:"}
                                   | {"vbuckets": "3,5", "start": "latest", "persisted_only": True})  # fmt: skip
    read = ReadOptions.read(options.reader_options())
    assert read.cluster == options.source
    assert (read.vbuckets, read.key_prefix, read.starting_offsets) == ((3, 5), "u:", "latest")
    assert (read.persisted_only, read.fail_on_data_loss) == (True, True)
    assert ReadOptions.read(PipelineOptions().reader_options()).max_rows_per_trigger == PipelineOptions().max_rows


def test_every_option_has_a_help_and_a_name_for_people() -> None:
    for field in dataclasses.fields(PipelineOptions):
        assert field.metadata["help"]
    assert [shown_name(field.name) for field in dataclasses.fields(JobOptions)] == ["from"]


def test_an_address_becomes_options_of_a_sink() -> None:
    assert connection(Address.parse("a:1,b:2")) == {"address": "a:1,b:2"}
    assert connection(Address.parse("upriver://u:p@a:1/b?tls=on")) == {
        "address": "a:1", "bucket": "b", "user": "u", "password": "p", "tls": "true",
    }  # fmt: skip
