"""Where the project draws random numbers or asks for time, a simulation must decide itself."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final
from unittest.mock import patch

#: With pieces this small a snapshot is sent in many turns, and anything may happen between two of them.
TURN_BYTES: Final = 1


class SeededSecrets:
    """Stands for the module ``secrets``: numbers that look unlike each other and come again for the same seed."""

    def __init__(self, seed: int) -> None:
        self._drawn = 0
        self._seed = seed

    def randbits(self, bits: int) -> int:
        self._drawn += 1
        # Readable in a history: the place in the order of drawing, and the seed.
        return (self._drawn << 16 | self._seed & 0xFFFF) & (1 << bits) - 1

    def token_hex(self, size: int) -> str:
        return f"{self.randbits(8 * size):0{2 * size}x}"


@contextmanager
def chance(seed: int) -> Iterator[None]:
    """While this lasts, everything is decided by the seed."""
    secrets = SeededSecrets(seed)
    level = logging.root.manager.disable
    with ExitStack() as stack:
        for module in ("upriver.engine.vbucket", "upriver.engine.bucket"):
            stack.enter_context(patch(f"{module}.secrets", secrets))
        stack.enter_context(patch("upriver.engine.maintenance.thread_time", lambda: 0.0))
        stack.enter_context(patch("upriver.protocol.producer.stream_scheduler.TURN_BYTES_MIN", TURN_BYTES))
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(level)
