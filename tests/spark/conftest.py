"""The tests of this folder need the spark extra."""

import pytest

pytest.importorskip("pyspark", reason="the spark extra is not installed")
