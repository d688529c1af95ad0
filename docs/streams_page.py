"""The generated parts of `docs/streams.md`: the settings and the states of a stream, from the tables in the source."""

from collections.abc import Iterator
from pathlib import Path

from docs.inserts import filled
from upriver.protocol.producer.controls import CONTROLS
from upriver.protocol.stream_state import TRANSITIONS, diagram

PAGE = Path(__file__).parent / "streams.md"


def streams_page() -> str:
    """The tables inside a page that is written by hand."""
    states = f"```mermaid\n{diagram()}```"
    return filled(
        PAGE, {"settings": "\n".join(_settings()), "states": "\n\n".join([states, "\n".join(_transitions())])}
    )


def _settings() -> Iterator[str]:
    yield "| name | default | meaning |"
    yield "|---|---|---|"
    for name, control in CONTROLS.items():
        default = str(control.default).lower() if isinstance(control.default, bool) else control.default
        yield f"| `{name}` | {'none' if default == '' else default} | {control.meaning} |"


def _transitions() -> Iterator[str]:
    yield "| state | event | next state |"
    yield "|---|---|---|"
    for state, events in TRANSITIONS.items():
        for event, target in events.items():
            yield f"| {state.value} | {event.value} | {target.value} |"
