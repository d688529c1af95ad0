"""The page about the client library leaves nothing out."""

from pathlib import Path

from upriver.client.consumer.settings import ConsumerSettings

PAGE = (Path(__file__).parents[2] / "docs" / "client.md").read_text()


def test_every_setting_is_documented() -> None:
    for name in ConsumerSettings.__slots__:
        if name not in ("name", "is_named", "checkpoint_interval_s"):
            assert f"`{name}`" in PAGE, name
