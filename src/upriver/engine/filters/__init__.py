"""Filters of streams: by key pattern in linear time, by a field of a JSON value.

A filter never looks at time or order, so a filtered stream is a filtered view of the full one.
"""

from upriver.engine.filters.json_match import read_json
from upriver.engine.filters.key_pattern import KeyPattern
from upriver.engine.filters.large_values import LargeValues
from upriver.engine.filters.value_filter import ValueFilter

__all__ = ["KeyPattern", "LargeValues", "ValueFilter", "read_json"]
