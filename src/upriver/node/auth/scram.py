"""SCRAM as scramp does it, for each of its hashes.

scramp is imported when the first user or login needs it: it costs a node without users a fifth of a second.
"""

import functools
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, Final

#: The mechanisms, by their RFC names, and the length of their hashes.
DIGEST_BYTES: Final = {"SCRAM-SHA-1": 20, "SCRAM-SHA-256": 32, "SCRAM-SHA-512": 64}
SCRAM: Final = tuple(DIGEST_BYTES)


def _scram_mechanism() -> Any:
    """scramp's ``ScramMechanism``, but with spaces allowed in a nonce.

    Couchbase's C++ client, on which most of its SDKs are built, writes its nonce as ``0x04 0xffffff88 …``. RFC 5802
    allows no space there, and scramp insists; a space is harmless, because only commas separate attributes. The rule is
    loosened in a copy of the module: others in this process may use scramp, too, and get what they expect.
    """
    spec = importlib.util.find_spec("scramp.core")
    assert spec is not None
    assert spec.loader is not None
    core: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(core)

    class Nonce(core.Nonce):  # type: ignore[misc]
        def __init__(self, nonce: str) -> None:
            super().__init__(nonce.replace(" ", "_"))
            self.nonce = nonce

    core.Nonce = Nonce
    return core.ScramMechanism


class Scramp:
    """What is used of scramp."""

    def __init__(self) -> None:
        scramp, utils = importlib.import_module("scramp"), importlib.import_module("scramp.utils")
        self.error: type[Any] = scramp.ScramException
        self.invalid_proof = utils.ServerError.INVALID_PROOF
        self.saslprep: Callable[[str], str] = utils.saslprep
        mechanism = _scram_mechanism()
        self.mechanisms: Mapping[str, Any] = {name: mechanism(name) for name in SCRAM}


@functools.cache
def scramp() -> Scramp:
    """scramp, imported once."""
    return Scramp()
