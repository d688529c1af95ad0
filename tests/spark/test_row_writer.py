"""Rows written to real nodes."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.node_contents import copies
from upriver.client import Address, SyncKvClient
from upriver.errors import RowsRefused
from upriver.model import Event, vbucket_of
from upriver.node import EmbeddedNode
from upriver.spark import row_writer
from upriver.spark.options import WriteOptions
from upriver.spark.row_writer import RowWriter, WriteOutcome, as_changes, impossible, layers


def rows(**columns: Sequence[object]) -> pa.RecordBatch:
    return pa.record_batch({name: pa.array(values) for name, values in columns.items()})


def writer(node: EmbeddedNode, **options: str) -> RowWriter:
    return RowWriter(WriteOptions.read({"address": node.address, **options}))


def test_the_last_row_of_a_key_counts_by_branch_and_seqno() -> None:
    batch = rows(key=[b"a", b"a", b"b", b"a"], value=[b"1", b"2", b"3", b"4"], branch=[1, 0, 0, 0], seqno=[2, 9, 3, 1])
    changes = as_changes(batch, with_meta=False)
    assert dict(zip(changes.column("key").to_pylist(), changes.column("value").to_pylist(), strict=True)) == {
        b"a": b"1",
        b"b": b"3",
    }


def test_without_an_event_a_null_deletes() -> None:
    changes = as_changes(rows(key=["a", "b"], value=["x", None]), with_meta=False)
    assert changes.column("event").to_pylist() == [Event.MUTATION, Event.DELETION]
    assert changes.column("value").to_pylist() == [b"x", b""]


@pytest.mark.parametrize(
    ("batch", "with_meta", "complaint"),
    [
        (rows(value=[b"x"]), False, "missing column key"),
        (rows(key=[b"x"], value=[b"x"]), True, "missing column cas, rev_seqno"),
        (rows(key=[b"a", None], value=[b"x", b"y"]), False, "a row has no key"),
        (rows(key=[b"a", None], event=["mutation", "reset"]), False, "report a reset.*pipeline replicate"),
        (rows(key=[b"a"], event=["rename"]), False, "unknown event 'rename'"),
    ],
)
def test_rows_that_mean_nothing(batch: pa.RecordBatch, with_meta: bool, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        as_changes(batch, with_meta=with_meta)


def test_upserts_and_deletions(upriver_node: EmbeddedNode) -> None:
    with SyncKvClient(upriver_node.address) as kv:
        kv.set("gone", "x")
        batch = rows(
            key=["a", "gone", "never"],
            value=["1", None, None],
            event=["mutation", "deletion", "expiration"],
            flags=[7, 0, 0],
        )
        assert writer(upriver_node).write([batch]) == WriteOutcome(written=2, known=1)
        item = kv.get("a")
        assert item is not None
        assert (item.value, item.flags) == (b"1", 7)
        assert kv.get("gone") is None


def test_with_meta_everything_is_kept_and_a_replay_changes_nothing(upriver_node: EmbeddedNode) -> None:
    batch = rows(
        key=[b"a", b"b"], value=[b"1", None], event=["mutation", "deletion"], cas=[-5, 12], rev_seqno=[3, 4],
        expiry=[0, 0], flags=[1, 0], seqno=[1, 2], branch=[0, 0],
    )  # fmt: skip
    first = writer(upriver_node, mode="meta").write([batch])
    assert (first.written, first.refused) == (2, 0)
    with SyncKvClient(upriver_node.address) as kv:
        item = kv.get("a")
    assert item is not None
    assert item.cas == 2**64 - 5
    high = [vbucket.high_seqno for vbucket in upriver_node.bucket]
    again = writer(upriver_node, mode="meta").write([batch])
    assert (again.written, again.known, again.refused) == (0, 2, 0)
    assert [vbucket.high_seqno for vbucket in upriver_node.bucket] == high
    forced = writer(upriver_node, mode="meta", conflicts="force").write([batch])
    assert forced.written == 2


def test_refused_rows(upriver_node: EmbeddedNode, tmp_path: Path) -> None:
    batch = rows(key=["a", "k" * 251], value=["1", "2"])
    with pytest.raises(RowsRefused, match=r"1 rows were refused.*deadLetterPath"):
        writer(upriver_node).write([batch])
    assert writer(upriver_node, errorsAs="ignore").write([batch]).refused == 1
    dead = tmp_path / "dead"
    outcome = writer(upriver_node, errorsAs="deadletter", deadLetterPath=str(dead)).write([batch])
    assert (outcome.written, outcome.refused, len(outcome.samples)) == (1, 1, 1)
    (buried,) = pq.read_table(dead).to_pylist()
    assert (buried["key"], buried["value"]) == ("k" * 251, "2")
    assert "0x" in buried["error"]


def test_refused_rows_are_kept_as_they_came(upriver_node: EmbeddedNode, tmp_path: Path) -> None:
    """So that they can be written again, once what was wrong with them is mended; and of each key only the last."""
    key, dead = "k" * 251, tmp_path / "dead letters"
    batch = rows(
        key=["a", key, key], value=["1", "2", "3"], event=["mutation", "deletion", "mutation"], seqno=[1, 3, 2],
        cas=[-1, -2, -3], rev_seqno=[1, 1, 1],
    )  # fmt: skip
    url = dead.as_uri()
    writer(upriver_node, mode="meta", errorsAs="deadletter", deadLetterPath=url).write([batch])
    (file,) = dead.iterdir()
    buried = pq.read_table(file)
    assert buried.schema.names == [*batch.schema.names, "error"]
    assert buried.drop_columns(["error"]).to_batches() == [batch.slice(1, 1)]
    again = buried.drop_columns(["key"]).append_column("key", pa.array(["b"]))
    assert writer(upriver_node, mode="meta").write(again.to_batches()).refused == 0


def test_batches_follow_each_other(upriver_node: EmbeddedNode) -> None:
    """Rows of a key in one batch after the other: the last one stays, however many are on their way."""
    batches = [rows(key=["a", f"k{n}"], value=[f"{n}", "v"]) for n in range(50)]
    assert writer(upriver_node).write(iter(batches)).written == 100
    with SyncKvClient(upriver_node.address) as kv:
        item = kv.get("a")
    assert item is not None
    assert item.value == b"49"


def test_when_rows_cannot_be_made_what_came_before_is_written(upriver_node: EmbeddedNode) -> None:
    batches = [rows(key=["a"], value=["1"]), rows(key=["b", None], value=["2", "3"])]
    with pytest.raises(ValueError, match="has no key"):
        writer(upriver_node).write(batches)
    with SyncKvClient(upriver_node.address) as kv:
        item = kv.get("a")
        assert item is not None
        assert item.value == b"1"
        assert kv.get("b") is None


def test_large_rows_go_out_in_small_batches(upriver_node: EmbeddedNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_writer, "BATCH_BYTES_MAX", 100_000)
    sizes: list[int] = []

    def counting(batch: pa.RecordBatch, *, with_meta: bool, places: pa.Array | None) -> pa.RecordBatch:
        sizes.append(batch.num_rows)
        return as_changes(batch, with_meta=with_meta, places=places)

    monkeypatch.setattr(row_writer, "as_changes", counting)
    large = [rows(key=[f"k{n}" for n in range(10)], value=["v" * 40_000] * 10), rows(key=["x"], value=["v" * 500_000])]
    assert writer(upriver_node).write(large).written == 11
    assert sizes == [2] * 5 + [1]


def test_outcomes_add_up() -> None:
    total = sum((WriteOutcome(1, 2, 3, ["a"] * 4), WriteOutcome(1, 1, 1, ["b"] * 4)), WriteOutcome())
    assert (total.written, total.known, total.refused, total.samples) == (2, 3, 4, ["a"] * 4 + ["b"])
    assert str(total) == "2 rows written, 3 known already, 4 refused"


@pytest.mark.parametrize("values", [pa.array([None, b"w"], pa.binary()), None])
def test_a_mutation_without_a_value_is_refused(upriver_node: EmbeddedNode, values: pa.Array | None) -> None:
    with SyncKvClient(upriver_node.address) as kv:
        kv.set("kept", b"document")
        columns = {"key": pa.array([b"kept", b"new"]), "event": pa.array(["mutation", "mutation"])}
        batch = pa.record_batch(columns if values is None else columns | {"value": values})
        with pytest.raises(RowsRefused, match="a mutation needs a value"):
            RowWriter(WriteOptions(address=Address.parse(upriver_node.address))).write([batch])
        ignoring = WriteOptions(address=Address.parse(upriver_node.address), errors_as="ignore")
        outcome = RowWriter(ignoring).write([batch])
        assert (outcome.written, outcome.refused) == ((0, 2) if values is None else (1, 1))
        item = kv.get("kept")
        assert item is not None
        assert item.value == b"document"


def test_a_value_that_is_too_large_is_a_refused_row(upriver_node: EmbeddedNode, tmp_path: Path) -> None:
    values = [b"small", bytes(21 * 2**20), b"also small"]
    batch = pa.record_batch({"key": pa.array([b"a", b"b", b"c"]), "value": pa.array(values)})
    options = WriteOptions(
        address=Address.parse(upriver_node.address), errors_as="deadletter", dead_letter_path=str(tmp_path / "dead")
    )
    outcome = RowWriter(options).write([batch])
    assert (outcome.written, outcome.refused) == (2, 1)
    (refused,) = pq.read_table(tmp_path / "dead").to_pylist()
    assert refused["key"] == b"b"
    assert "the maximum is 20,971,520" in refused["error"]


@pytest.mark.parametrize(
    ("name", "numbers", "reason"),
    [
        ("flags", pa.array([-1, 2**32 - 1, None], pa.int64()), "flags is -1; it must be from 0 to 4,294,967,295"),
        ("flags", pa.array([-1, 7, None], pa.int32()), "flags is -1; it must be from 0"),
        ("expiry", pa.array([2**32, 0, 1], pa.int64()), "expiry is 4,294,967,296; it must be from 0 to 4,294,967,295"),
        ("datatype", pa.array([256, 0, 0], pa.int32()), "datatype is 256; it must be from 0 to 255"),
        ("rev_seqno", pa.array([-5, 1, 2], pa.int32()), "rev_seqno is -5; it must not be negative"),
    ],
)
def test_a_number_that_does_not_fit_is_a_refused_row(
    upriver_node: EmbeddedNode, tmp_path: Path, name: str, numbers: pa.Array, reason: str
) -> None:
    batch = pa.record_batch({"key": pa.array([b"a", b"b", b"c"]), "value": pa.array([b"v"] * 3), name: numbers})
    address = Address.parse(upriver_node.address)
    with pytest.raises(RowsRefused, match=reason):
        RowWriter(WriteOptions(address=address)).write([batch])
    options = WriteOptions(address=address, errors_as="deadletter", dead_letter_path=str(tmp_path / "dead"))
    outcome = RowWriter(options).write([batch])
    assert (outcome.written, outcome.refused) == (2, 1)
    (refused,) = pq.read_table(tmp_path / "dead").to_pylist()
    assert (refused["key"], refused[name]) == (b"a", numbers[0].as_py())
    assert reason in refused["error"]


def test_numbers_of_64_bits_keep_their_bits() -> None:
    batch = pa.record_batch({"key": pa.array([b"a"]), "cas": pa.array([-1], pa.int64())})
    assert impossible(batch) == {}
    assert as_changes(batch, with_meta=False).column("cas").to_pylist() == [2**64 - 1]


# Where rows go


def twins(vbuckets: int) -> tuple[pa.RecordBatch, dict[int, bytes]]:
    """The rows of one key in all vbuckets, and what they leave in each."""
    numbers = list(range(vbuckets))
    batch = rows(
        key=[b"k"] * (2 * vbuckets), vbucket=numbers * 2, seqno=[1] * vbuckets + [2] * vbuckets,
        value=[b"old"] * vbuckets + [b"v%d" % number for number in numbers], cas=[5] * vbuckets + [6] * vbuckets,
        rev_seqno=[1] * vbuckets + [2] * vbuckets,
    )  # fmt: skip
    return batch, {number: b"v%d" % number for number in numbers}


@pytest.mark.parametrize("mode", ["upsert", "meta"])
@pytest.mark.upriver(vbuckets=4)
def test_a_key_stays_in_all_its_vbuckets(upriver_node: EmbeddedNode, mode: str) -> None:
    batch, wanted = twins(4)
    options = {"mode": mode, "sourceVbuckets": "4"}
    assert writer(upriver_node, **options).write([batch]) == WriteOutcome(written=4)
    assert copies(upriver_node, b"k") == wanted
    if mode == "meta":
        assert writer(upriver_node, **options).write([batch]) == WriteOutcome(known=4)
    gone = rows(key=[b"k"], vbucket=[1], value=[None], event=["deletion"], cas=[9], rev_seqno=[9])
    assert writer(upriver_node, **options).write([gone]) == WriteOutcome(written=1)
    assert copies(upriver_node, b"k") == {number: value for number, value in wanted.items() if number != 1}


@pytest.mark.upriver(vbuckets=4)
def test_a_row_that_would_replace_another_document_is_refused(upriver_node: EmbeddedNode, tmp_path: Path) -> None:
    """Without the number of vbuckets of the source, a row in another vbucket than its key's means nothing."""
    batch, wanted = twins(4)
    own = vbucket_of(b"k", 4)
    with pytest.raises(RowsRefused, match=r"instead of its key's; set sourceVbuckets to the number"):
        writer(upriver_node).write([batch])
    outcome = writer(upriver_node, errorsAs="deadletter", deadLetterPath=str(tmp_path)).write([batch])
    assert (outcome.written, copies(upriver_node, b"k")) == (1, {own: wanted[own]})
    buried = pq.read_table(tmp_path).to_pylist()
    assert {row["vbucket"]: row["value"] for row in buried} == {n: v for n, v in wanted.items() if n != own}
    batch = rows(key=[b"k", b"k"], vbucket=[own, None], value=[b"1", b"2"])
    assert writer(upriver_node).write([batch]) == WriteOutcome(written=1)
    batch = rows(key=[b"k", b"k"], vbucket=[own ^ 1, own ^ 2], value=[b"1", b"2"])
    assert writer(upriver_node, sourceVbuckets="0").write([batch]) == WriteOutcome(written=1)
    assert copies(upriver_node, b"k") == {own: b"2"}


@pytest.mark.upriver(vbuckets=8)
def test_rows_of_a_cluster_with_another_number_of_vbuckets(upriver_node: EmbeddedNode) -> None:
    """Documents move to the vbucket of their key; one that was elsewhere has no place, and its deletion no object."""
    keys = [b"k%d" % n for n in range(50)]
    placed = [vbucket_of(key, 4) for key in keys]
    batch = rows(key=keys, value=keys, vbucket=placed)
    assert writer(upriver_node, sourceVbuckets="4").write([batch]) == WriteOutcome(written=50)
    for key in keys:
        assert copies(upriver_node, key) == {vbucket_of(key, 8): key}
    batch = rows(key=keys[:2], value=[b"x", b"y"], vbucket=[placed[0] ^ 1, placed[1]])
    with pytest.raises(RowsRefused, match=r"no place here, because its source has 4 vbuckets and this cluster 8"):
        writer(upriver_node, sourceVbuckets="4").write([batch])
    batch = rows(key=keys[:1], value=[None], vbucket=[placed[0] ^ 1], event=["deletion"])
    assert writer(upriver_node, sourceVbuckets="4").write([batch]) == WriteOutcome(known=1)
    assert copies(upriver_node, keys[0]) == {vbucket_of(keys[0], 8): keys[0]}


@pytest.mark.parametrize("number", [-1, 4, 65536])
@pytest.mark.upriver(vbuckets=4)
def test_a_vbucket_that_does_not_exist(upriver_node: EmbeddedNode, number: int) -> None:
    batch = rows(key=[b"k"], value=[b"v"], vbucket=[number])
    with pytest.raises(RowsRefused, match=f"in vbucket {number} .*this cluster has 4 vbuckets"):
        writer(upriver_node, sourceVbuckets="4").write([batch])


def test_a_key_occurs_once_in_each_layer() -> None:
    batch = rows(key=[b"a", b"b", b"a", b"a"], vbucket=[0, 0, 1, 2])
    assert [layer.column("vbucket").to_pylist() for layer in layers(batch)] == [[0, 0], [1], [2]]
    assert layers(batch.slice(0, 2)) == [batch.slice(0, 2)]
