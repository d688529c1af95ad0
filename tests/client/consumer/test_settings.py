"""What a consumer may be told."""

import math
from dataclasses import fields
from typing import Any, get_args, get_type_hints

import pytest

from upriver.client.consumer.settings import ColumnName, ConsumerArguments, ConsumerSettings
from upriver.errors import InvalidArguments, NotSupported
from upriver.model import CHANGES


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dialect": "kafka"}, "unknown dialect 'kafka'; choose from"),
        ({"on_rollback": "ignore"}, "unknown policy 'ignore'; choose from fail, rewind, emit"),
        ({"start": "now"}, "start must be earliest, latest or positions"),
        ({"end": "soon"}, "end must be never, latest or seqnos"),
        ({"columns": ("key", "size")}, "unknown column size"),
        ({"columns": ()}, "name at least one column"),
        ({"vbuckets": []}, "one or more numbers from 0 to 65535, not an empty list"),
        ({"vbuckets": [3, -1]}, "numbers from 0 to 65535, not -1 to 3"),
        ({"stall_s": 0}, "stall_s must be positive, not 0"),
        ({"window_bytes": -1}, "window_bytes must be 0 or more, not -1"),
        ({"noop_interval_s": -0.5}, "noop_interval_s must be 0 or more, not -0.5"),
        ({"patience_s": 0}, "patience_s must be positive, not 0"),
    ],
)
def test_what_makes_no_sense(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArguments, match=said):
        ConsumerSettings(**settings)


def test_our_own_settings_go_to_our_own_nodes_alone() -> None:
    settings = ConsumerSettings(key_filter="^a", keys_only=True, end="latest", history=True)
    assert settings.upriver_controls(is_upriver_node=True, node="n") == {
        "key_filter": "^a",
        "history": "true",
        "keys_only": "true",
        "exact_end": "true",
    }
    with pytest.raises(NotSupported, match="n is not an Upriver node and does not support key_filter, history"):
        settings.upriver_controls(is_upriver_node=False, node="n")
    # What does not change the contents is left out without a word.
    assert ConsumerSettings(keys_only=True, end="latest").upriver_controls(is_upriver_node=False, node="n") == {}


def test_names_differ() -> None:
    assert ConsumerSettings().name != ConsumerSettings().name
    assert ConsumerSettings(vbuckets=[3, 1, 3]).vbuckets == (1, 3)


def test_a_consumer_with_an_end_gives_up() -> None:
    assert ConsumerSettings().gives_up_after_s == math.inf
    assert ConsumerSettings(end="latest").gives_up_after_s == ConsumerSettings(end={0: 1}).gives_up_after_s == 60
    assert (
        ConsumerSettings(patience_s=5).gives_up_after_s == ConsumerSettings(patience_s=5, end={}).gives_up_after_s == 5
    )


def test_the_names_of_columns_are_those_of_the_schema() -> None:
    assert list(get_args(ColumnName)) == CHANGES.names


def test_the_keyword_arguments_are_the_settings() -> None:
    settings = get_type_hints(ConsumerSettings)
    assert get_type_hints(ConsumerArguments) == {
        each.name: settings[each.name] for each in fields(ConsumerSettings) if each.init
    }
