"""Reports of tasks, added up by the driver."""

from upriver.tables.documents.field_report import NAMES_MAX, FieldReport


def test_reports_add_up() -> None:
    one = FieldReport(10, {"a": {"int": 3}, "b": {"text": 1}}, frozenset({"n"}))
    other = FieldReport(5, {"c": {"json": 2}, "a": {"int": 1, "float": 2}}, frozenset({"m"}))
    assert one + other == FieldReport(
        15, {"a": {"int": 4, "float": 2}, "b": {"text": 1}, "c": {"json": 2}}, frozenset({"m", "n"})
    )
    assert list((one + other).unknown) == ["a", "b", "c"]
    assert one == FieldReport(10, {"a": {"int": 3}, "b": {"text": 1}}, frozenset({"n"}))  # unchanged
    assert sum([one, other], FieldReport()) == one + other


def test_a_report_travels_as_bytes() -> None:
    report = FieldReport(10, {"a": {"int": 3, "json": 1}, "größe 😀": {"text": 1}}, frozenset({"n"}))
    assert FieldReport.of_bytes(report.as_bytes()) == report
    assert FieldReport.of_bytes(FieldReport().as_bytes()) == FieldReport()


def test_a_report_is_true_if_the_schema_could_change() -> None:
    assert not FieldReport(10)
    assert FieldReport(10, {"a": {"int": 1}})
    assert FieldReport(10, {}, frozenset({"n"}))


def test_a_sum_keeps_the_most_frequent_names() -> None:
    rare = [FieldReport(1, {f"{part}/{n}": {"int": 1} for n in range(NAMES_MAX)}) for part in range(3)]
    total = rare[0] + FieldReport(9, {"frequent": {"int": 9}}) + rare[1] + FieldReport(1, {"new": {"int": 1}}) + rare[2]
    assert len(total.unknown) == NAMES_MAX
    assert total.documents == 13
    assert total.unknown["frequent"] == {"int": 9}
    assert "0/0" in total.unknown  # of equal ones, the first
