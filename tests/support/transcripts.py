"""The recordings of real servers, packet by packet."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from upriver.errors import WireError
from upriver.wire import Dialect, Framer
from upriver.wire.dialects.dcp import dcp
from upriver.wire.dialects.tap import tap

_FOLDER = Path(__file__).parent.parent / "data" / "transcripts"


@dataclass(frozen=True)
class Packet:
    """One recorded packet and where it stands."""

    recording: str
    line: int
    data: bytes


def recordings() -> list[str]:
    """The names of all recordings."""
    return sorted(path.stem for path in _FOLDER.glob("*.txt"))


def dialect_of(recording: str) -> Dialect:
    """What a recorded connection speaks; `dcp` also knows the messages of the builds of 2014."""
    return tap if recording.startswith("tap") else dcp


def packets_of(recording: str) -> Iterator[Packet]:
    """Every packet in both directions; pipelined ones are on one line."""
    text = (_FOLDER / f"{recording}.txt").read_text()
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#"):
            continue
        _, _, _, *data = line.split()
        framer = Framer(dialect_of(recording).framing)
        framer.feed(bytes.fromhex("".join(data)))
        while packet := framer.next_packet():
            yield Packet(recording, number, packet)
        assert not framer.pending, f"{recording}:{number} ends inside a packet"


def unfaithful(recording: str) -> dict[str, str]:
    """Packets that are refused or encoded in other bytes than they came in, and what becomes of them."""
    out: dict[str, str] = {}
    dialect = dialect_of(recording)
    for packet in packets_of(recording):
        try:
            again = dialect.decode(packet.data).encode()
        except WireError as error:
            out[packet.data.hex()] = str(error)
        else:
            if again != packet.data:
                out[packet.data.hex()] = again.hex()
    return out
