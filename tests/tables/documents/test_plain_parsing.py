"""The plain twin: its limits are those of the compiled one. Its results are tested with the compiled ones."""

import pytest

from upriver.tables import schema
from upriver.tables.documents import field_report, plain_parsing


def test_both_twins_have_the_same_limits() -> None:
    compiled = pytest.importorskip("upriver.tables.documents._parsing")
    assert compiled.LIMITS == {
        "DEPTH_MAX": plain_parsing.DEPTH_MAX,
        "NUMBER_BYTES_MAX": plain_parsing.NUMBER_BYTES_MAX,
        "NAMES_MAX": field_report.NAMES_MAX,
        "NAMES_KEPT": plain_parsing.NAMES_KEPT,
        "NAME_BYTES_MAX": schema.NAME_BYTES_MAX,
    }
    assert compiled.KINDS == schema.KINDS
    assert tuple(schema.TYPES[kind] for kind in schema.KINDS) == compiled.TYPES
