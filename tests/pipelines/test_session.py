"""A Spark that runs already is used as it is."""

import pytest

pytest.importorskip("pyspark", reason="the spark extra is not installed")


from upriver.pipelines.session import SETTINGS


def test_nothing_is_shown_and_nothing_listens_to_the_world() -> None:
    assert SETTINGS["spark.ui.enabled"] == SETTINGS["spark.ui.showConsoleProgress"] == "false"
    assert SETTINGS["spark.driver.bindAddress"] == SETTINGS["spark.driver.host"] == "127.0.0.1"
