"""Results of tasks on their way to the driver."""

from pyroaring import BitMap

from upriver.tables import FieldReport, NewFile, PartResult


def test_a_result_travels_as_bytes() -> None:
    files = (
        NewFile("a.parquet", 10, 3, {"numRecords": 3, "tightBounds": True}).with_dead(BitMap([1, 2])),
        NewFile("b.parquet", 11, 1, {"numRecords": 1}),
        NewFile("ü.parquet", 12, 9, {"numRecords": 9, "tightBounds": True}).with_dead(BitMap([0])),
    )
    report = FieldReport(7, {"x": {"int": 3}}, frozenset({"y"}))
    result = PartResult(files, "_upriver/a.keys", (1, 2, 9), (9,), report, 10, 4)
    assert PartResult.of_bytes(result.to_bytes()) == result
    assert [file.dead_rows for file in PartResult.of_bytes(result.to_bytes()).files] == [
        BitMap([1, 2]), BitMap(), BitMap([0])
    ]  # fmt: skip


def test_dead_rows_are_a_bitmap_not_a_list() -> None:
    file = NewFile("a.parquet", 10, 10**6, {"numRecords": 10**6}).with_dead(BitMap(range(900_000)))
    assert len(PartResult((file,), "", (), (), FieldReport(), 0, 0).to_bytes()) < 1000
