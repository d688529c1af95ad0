"""The examples of docs/client.md run."""

import re
from pathlib import Path

import pytest

from upriver.client.settings import ConsumerSettings
from upriver.node import EmbeddedNode

PAGE = (Path(__file__).parents[2] / "docs" / "client.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_every_example_runs(number: int, upriver_node: EmbeddedNode) -> None:
    exec(compile(EXAMPLES[number].replace("127.0.0.1:11210", upriver_node.address), f"example {number}", "exec"), {})


def test_every_setting_is_documented() -> None:
    for name in ConsumerSettings.__slots__:
        if name not in ("name", "is_named", "checkpoint_interval_s"):
            assert f"`{name}`" in PAGE, name
