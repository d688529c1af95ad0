"""Options: every one valid and invalid, and errors that name the option, the value and what may be."""

import dataclasses

import pytest

from upriver.errors import OptionError
from upriver.spark.batch_planner import Rules
from upriver.spark.options import ReadOptions, WriteOptions, spark_name

VALID = {
    "address": ("a:1,b:2", "upriver://u:p@h:1/b?tls=on"),
    "bucket": ("beer",),
    "user": ("ann",),
    "password": ("secret", ""),
    "tls": ("true", "OFF"),
    "ca": ("/etc/ca.pem",),
    "dialect": ("dcp", "UPR", "upr_draft1", "tap"),
    "streamPort": ("11299",),
    "name": ("my query",),
    "vbuckets": ("all", "0-511,700", "3"),
    "startingOffsets": ("earliest", "Latest", '{"0": "latest", "1": {"uuid": "0x5", "seqno": 7}}'),
    "endingOffsets": ("latest", '{"0": "latest"}'),
    "maxRowsPerTrigger": ("1", "1000000"),
    "maxBytesPerTrigger": ("1000", "16m", "1.5GB"),
    "minRowsPerTrigger": ("10",),
    "maxTriggerDelay": ("500ms", "30s", "5m"),
    "minPartitions": ("4",),
    "cores": ("64",),
    "onRollback": ("fail", "rewind", "Emit"),
    "failOnDataLoss": ("true", "false"),
    "flushResets": ("true",),
    "output": ("changes", "Ranges"),
    "shards": ("8",),
    "rowsPerTask": ("1000",),
    "bytesPerTask": ("64m",),
    "keysOnly": ("true",),
    "keyPrefix": ("user:",),
    "keyFilter": ("^user:[0-9]+$",),
    "valueFilter": (
        '{"field": "a.b", "equals": 1}',
        '{"field": "a", "equals": null}',
        '{"field": "a", "equals": %s}' % ("9" * 5000),
    ),
    "persistedOnly": ("true",),
    "history": ("true",),
    "valueFormat": ("binary", "string", "JSON"),
    "valueSchema": (),
    "rowsPerBatch": ("10000",),
}
INVALID = {
    "address": ("host:port", "http://x", ""),
    "bucket": ("",),
    "user": ("",),
    "tls": ("perhaps",),
    "ca": ("",),
    "dialect": ("kafka",),
    "streamPort": ("0", "65536", "x"),
    "name": ("",),
    "vbuckets": ("", "5-3", "0-1024", "a"),
    "startingOffsets": ("soon", '{"0": "soon"}', "[]"),
    "endingOffsets": ("earliest", '{"0": "latest", "1": "earliest"}', "soon"),
    "maxRowsPerTrigger": ("0", "-1", "many", "1.5"),
    "maxBytesPerTrigger": ("0", "-1m", "16 parsec"),
    "minRowsPerTrigger": ("0",),
    "maxTriggerDelay": ("soon", "-1s", "5"),
    "minPartitions": ("0",),
    "cores": ("0", "all"),
    "onRollback": ("ignore",),
    "failOnDataLoss": ("maybe",),
    "flushResets": ("maybe",),
    "output": ("rows",),
    "shards": ("0",),
    "rowsPerTask": ("0",),
    "bytesPerTask": ("0",),
    "keysOnly": ("2",),
    "keyPrefix": ("",),
    "keyFilter": ("",),
    "valueFilter": ("a = 1", "{}", "[" * 9999),
    "persistedOnly": ("x",),
    "history": ("x",),
    "valueFormat": ("xml",),
    "valueSchema": ("", "name string"),
    "rowsPerBatch": ("0",),
}


def test_every_option_is_tried() -> None:
    names = {spark_name(field.name) for field in dataclasses.fields(ReadOptions)}
    assert names == set(VALID)
    assert names == set(INVALID) | {"password"}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in VALID.items() for value in values])
def test_what_is_valid_is_taken_in_any_case(name: str, value: str) -> None:
    assert ReadOptions.read({name: value}) == ReadOptions.read({name.upper(): value})


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in INVALID.items() for value in values])
def test_what_is_not_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(OptionError) as caught:
        ReadOptions.read({name: value})
    assert caught.value.name == name
    assert repr(value) in str(caught.value)


def test_an_error_names_what_is_allowed() -> None:
    with pytest.raises(OptionError, match="onRollback = 'ignore': it must be one of fail, rewind, emit"):
        ReadOptions.read({"onrollback": "ignore"})


def test_a_slip_of_the_pen_is_seen() -> None:
    with pytest.raises(OptionError, match="did you mean startingOffsets"):
        ReadOptions.read({"startingOffset": "latest"})


def test_a_password_is_never_shown() -> None:
    address = ReadOptions.read({"address": "h:1", "user": "ann", "password": "secret"}).cluster
    assert (address.user, address.password) == ("ann", "secret")
    assert "secret" not in repr(address)
    for wrong in (
        {"address": "upriver://ann:secret@h:x"},
        {"address": "upriver://ann:se/secret@h:1"},
        {"adress": "upriver://ann:secret@h:1"},
        {"pasword": "secret"},
    ):
        with pytest.raises(OptionError) as caught:
            ReadOptions.read(wrong)
        assert "secret" not in str(caught.value)


def test_options_that_contradict_each_other_are_refused() -> None:
    for options in (
        {"keyPrefix": "a", "keyFilter": "b"},
        {"minRowsPerTrigger": "5", "maxRowsPerTrigger": "4"},
    ):
        with pytest.raises(OptionError):
            ReadOptions.read(options)


@pytest.mark.parametrize(
    "more",
    [
        {"startingOffsets": '{"0": "latest"}'},
        {"startingOffsets": "latest"},
        {"endingOffsets": '{"0": {"uuid": 5, "seqno": 7}}'},
        {"maxRowsPerTrigger": "5"},
        {"onRollback": "emit"},
        {"keyPrefix": "a"},
        {"history": "true"},
    ],
)
def test_what_tap_cannot_promise_is_refused(more: dict[str, str]) -> None:
    with pytest.raises(OptionError, match=f"dialect = 'tap'.*no seqnos.*leave out {next(iter(more))}.*use dcp"):
        ReadOptions.read({"dialect": "tap", **more})


def test_a_name_is_one_of_many_connections() -> None:
    settings = ReadOptions.read({"name": "my query"}).consumer_settings(("key",))
    assert settings.name.startswith("my query:")
    assert settings.name != ReadOptions.read({"name": "my query"}).consumer_settings(("key",)).name


def test_a_schema_of_documents_belongs_to_json() -> None:
    options = ReadOptions.read({"valueFormat": "json", "valueSchema": "name string"})
    assert options.value_schema == "name string"
    with pytest.raises(OptionError, match="valueFormat = json"):
        ReadOptions.read({"valueFormat": "string", "valueSchema": "name string"})


def test_what_is_not_said_in_the_address_is_said_beside_it() -> None:
    options = ReadOptions.read({"address": "h:1", "bucket": "beer", "user": "ann", "password": "x", "tls": "true"})
    assert str(options.cluster) == "upriver://ann@h:1/beer"
    assert options.cluster.tls


def test_the_rules_for_losses() -> None:
    assert ReadOptions().rules == Rules("fail", True)
    assert ReadOptions.read({"onRollback": "emit", "failOnDataLoss": "false"}).rules == Rules("emit", False)


def test_what_spark_says_to_itself_is_no_slip() -> None:
    of_spark = {"checkpointLocation": "/c", "queryName": "q"}
    assert WriteOptions.read(of_spark | {"mode": "meta"}) == WriteOptions.read({"mode": "meta"})


def test_write_options() -> None:
    assert WriteOptions.read({"mode": "META", "conflicts": "force"}).mode == "meta"
    with pytest.raises(OptionError, match="upsert, meta"):
        WriteOptions.read({"mode": "append"})
    with pytest.raises(OptionError, match="deadLetterPath belong together"):
        WriteOptions.read({"errorsAs": "deadletter"})
