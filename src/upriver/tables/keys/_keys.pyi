import numpy as np
from numpy.typing import NDArray

def sip_hash(seed: bytes, vbucket: int, key: bytes) -> bytes: ...
def hash_into(
    seed: bytes,
    vbuckets: NDArray[np.uint16],
    offsets: NDArray[np.int32] | NDArray[np.int64],
    data: NDArray[np.uint8],
    first: int,
    entries: NDArray[np.uint64],
) -> None: ...
def sort_in_place(entries: NDArray[np.uint64]) -> None: ...
def bounds_into(
    entries: NDArray[np.uint64], hashes: NDArray[np.uint64], first: NDArray[np.uint32], last: NDArray[np.uint32]
) -> None: ...
def lower_bound(entries: NDArray[np.uint64], high: int) -> int: ...
def text_into(
    offsets: NDArray[np.int32] | NDArray[np.int64], data: NDArray[np.uint8], found: NDArray[np.uint8]
) -> int: ...
def last_into(
    entries: NDArray[np.uint64],
    offsets: NDArray[np.int32] | NDArray[np.int64],
    data: NDArray[np.uint8],
    found: NDArray[np.uint8],
) -> None: ...
