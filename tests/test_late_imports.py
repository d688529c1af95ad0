"""Packages that import what they export only when it is used."""

import pytest

from upriver.late_imports import late_imports


def test_a_name_is_imported_from_its_module_when_it_is_used() -> None:
    find = late_imports("json", decoder="JSONDecoder JSONDecodeError", encoder="JSONEncoder")
    assert find("JSONEncoder").__module__ == "json.encoder"
    assert find("JSONDecodeError").__module__ == "json.decoder"


def test_other_names_are_missing_as_in_any_module() -> None:
    with pytest.raises(AttributeError, match=r"module 'json' has no attribute 'other'"):
        late_imports("json", decoder="JSONDecoder")("other")
