"""How fast one node fills another: two node processes and a mover that relays between them.

    python -m bench.replication [--changes N] [--value BYTES] [--vbuckets N]

The source is filled first; then the clock runs until the replica has applied the last change. The second line is the
same bytes from the source, discarded on arrival. The third is the CPU time of each of the three processes per change,
which depends least on the load of the machine.
"""

import argparse
import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from upriver.client import Mover
from upriver.model import VbucketState
from upriver.node import EmbeddedNode, start
from upriver.protocol.move.mover import Goal
from upriver.wire import Framer, Message, dcp, memcached
from upriver.wire.framing import MEMCACHED

HOST = "127.0.0.1"
WAIT_S = 120.0
LOOK_S = 0.02


def serve(vbuckets: int, changes: int, value_bytes: int) -> None:
    """A node in a separate process: filled, or with empty replicas."""
    with start(vbuckets=vbuckets) as node:
        node.call(_fill, node, vbuckets, changes, b"v" * value_bytes)
        print(node.port, flush=True)
        sys.stdin.read()


def _fill(node: EmbeddedNode, vbuckets: int, changes: int, value: bytes) -> None:
    for number in range(vbuckets):
        vbucket = node.bucket.vbucket(number)
        if not changes:
            vbucket.set_state(VbucketState.REPLICA)
        for key in range(changes // vbuckets):
            vbucket.set(b"key:%012d" % key, value)


@contextlib.contextmanager
def node_process(vbuckets: int, changes: int, value_bytes: int) -> Iterator[tuple[int, int]]:
    """The port and the process of a node that runs until the block is left."""
    arguments = ["--serve", f"{vbuckets}:{changes}:{value_bytes}"]
    command = [sys.executable, "-m", "bench.replication", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield int(process.stdout.readline()), process.pid
        finally:
            process.stdin.close()
            process.wait(WAIT_S)


def worked_s(pid: int) -> float:
    """The CPU time of a process."""
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


class Asker:
    """Asks a node how far it is."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection((HOST, port))
        self._framer = Framer(MEMCACHED)

    def changes(self) -> int:
        """The sum of all high seqnos."""
        self._socket.sendall(memcached.GetAllVbucketSeqnos().encode())
        answer = self._next()
        assert isinstance(answer, memcached.GetAllVbucketSeqnosResponse), answer
        return sum(entry.seqno for entry in answer.seqnos)

    def _next(self) -> Message:
        while (packet := self._framer.next_packet()) is None:
            self._framer.feed(self._socket.recv(65536))
        return dcp.dcp.decode(packet)

    def close(self) -> None:
        self._socket.close()


async def replicate(source: int, destination: int, vbuckets: int, changes: int) -> float:
    """Seconds until the replica has everything."""
    mover = Mover(f"{HOST}:{source}", f"{HOST}:{destination}", range(vbuckets), Goal.REPLICATE)
    asker = Asker(destination)
    started = time.perf_counter()
    running = asyncio.create_task(mover.carry_out())
    async with asyncio.timeout(WAIT_S):
        while asker.changes() < changes:
            await asyncio.sleep(LOOK_S)
    took = time.perf_counter() - started
    mover.stop()
    await running
    asker.close()
    return took


def discard(source: int, vbuckets: int, total_bytes: int) -> float:
    """Seconds for the same bytes without applying them."""
    with socket.create_connection((HOST, source)) as peer:
        peer.sendall(dcp.Open(name=b"discard", flags=dcp.OpenFlag.PRODUCER).encode())
        peer.recv(24, socket.MSG_WAITALL)
        started, received, buffer = time.perf_counter(), 0, bytearray(512 * 1024)
        peer.sendall(b"".join(dcp.StreamRequest(vbucket=number, opaque=1).encode() for number in range(vbuckets)))
        while received < total_bytes:
            received += peer.recv_into(buffer)
        return time.perf_counter() - started


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--changes", type=int, default=1_000_000)
    parser.add_argument("--value", type=int, default=64)
    parser.add_argument("--vbuckets", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(*map(int, given.serve.split(":")))
        return
    changes = given.changes // given.vbuckets * given.vbuckets
    size = len(dcp.Mutation(by_seqno=1, key=b"key:%012d" % 0, value=b"v" * given.value).encode())
    with node_process(given.vbuckets, changes, given.value) as (source, source_pid):
        times, work = [], []
        for _ in range(given.rounds):
            with node_process(given.vbuckets, 0, 0) as (destination, destination_pid):
                pids = (source_pid, os.getpid(), destination_pid)
                before = [worked_s(pid) for pid in pids]
                times.append(asyncio.run(replicate(source, destination, given.vbuckets, changes)))
                work.append([worked_s(pid) - past for pid, past in zip(pids, before, strict=True)])
        thrown_away = min(discard(source, given.vbuckets, changes * size) for _ in range(given.rounds))
    best = min(times)
    print(f"{changes:,} changes of {given.value} bytes in {given.vbuckets} vbuckets")
    print(f"applied by the other node   {changes / best / 1e6:6.2f} M changes/s   goal 0.80")
    costs = [min(each) / changes * 1e6 for each in zip(*work, strict=True)]
    print("source {:.2f}, mover {:.2f}, destination {:.2f} us of work for a change".format(*costs))
    print(
        f"read and thrown away        {changes / thrown_away / 1e6:6.2f} M changes/s   {thrown_away / best:.2f} of it"
    )


if __name__ == "__main__":
    main()
