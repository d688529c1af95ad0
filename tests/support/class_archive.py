"""The Java options of every Spark that the tests start, and the classes of Spark in a file that Java maps at its start.

A virtual machine of a test lives for seconds and spends most of them loading classes from jars. So it compiles little,
collects simply, and maps the archive, which halves its start. ``python -m tests.support.class_archive`` records the
archive of this Java and this Spark unless there is one; ``make test`` does so first. Without it, or on a class path
that is not the recorded one, Java reads the jars.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

#: Java would print a warning to stdout if it cannot use the archive.
_BRIEF: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:disable"
_RECORD_S: Final = 900


def archive() -> Path | None:
    """Where the archive is or would be; None without Java or Spark."""
    home = os.environ.get("JAVA_HOME")
    java = Path(home, "bin", "java") if home else Path(shutil.which("java") or "")
    release = java.resolve().parent.parent / "release"
    try:
        return Path(sys.prefix, f"spark-{version('pyspark')}-java-{zlib.crc32(release.read_bytes()):08x}.jsa")
    except (OSError, PackageNotFoundError):
        return None


def java_options() -> str:
    """The options of a virtual machine that lives for seconds."""
    path = archive()
    return f"{_BRIEF} -XX:SharedArchiveFile={path}" if path is not None and path.exists() else _BRIEF


def environment() -> dict[str, str]:
    """The variables with the options for the drivers that this process and its children start, and their launchers."""
    return {"SPARK_LAUNCHER_OPTS": _BRIEF, "SPARK_SUBMIT_OPTS": java_options()}


def record(path: Path) -> None:
    """Run what the tests run, and let Java write the classes that it loaded."""
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        part = Path(directory, "part")
        variables = {**os.environ, **environment(), "SPARK_SUBMIT_OPTS": f"{_BRIEF} -XX:ArchiveClassesAtExit={part}"}
        command = [sys.executable, "-m", "tests.support.class_archive", "load", directory]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=_RECORD_S, check=False)
        if done.returncode or not part.exists():
            print(f"the classes of Spark were not recorded, so tests start it slowly:\n{done.stderr[-2000:]}")
            return
        for old in path.parent.glob("spark-*.jsa"):
            old.unlink()
        part.rename(path)


def load(directory: Path) -> None:
    """Load the classes of batches, streams, pipelines and Spark Connect into a virtual machine, and end it."""
    from tests.support.restartable_node import free_port
    from tests.support.spark_session import new_session
    from upriver.client import SyncKvClient
    from upriver.node import start
    from upriver.pipelines import find, run

    port = free_port()
    connect = {
        "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
    }
    with start(vbuckets=4) as source, start(vbuckets=4) as destination:
        with SyncKvClient(source.address) as kv:
            kv.set_many(dict.fromkeys(("a", "b"), b'{"name": "salmon"}'))
        spark = new_session(connect)
        changes = spark.read.format("upriver").option("address", source.address).load()
        changes.groupBy("event").count().write.parquet(str(directory / "counts"))
        spark.read.parquet(str(directory / "counts")).collect()
        for pipeline, to in (("mirror", directory / "table"), ("replicate", destination.address)):
            job = find(pipeline).of(source=source.address, to=str(to))
            run(job, checkpoint=directory / pipeline, once=True)
        client = Path(__file__).parent.parent / "spark" / "connect_client.py"
        given = [f"sc://127.0.0.1:{port}", source.address, destination.address, str(directory)]
        subprocess.run([sys.executable, str(client), *given], stdout=subprocess.DEVNULL, check=True)
        gateway: Any = spark.sparkContext._gateway
        spark.stop()
        gateway.proc.stdin.close()  # it ends with its parent
        gateway.proc.wait()


def main() -> None:
    """Record the archive, unless there is one."""
    if len(sys.argv) == 3:
        load(Path(sys.argv[2]))
    elif (path := archive()) is not None and not path.exists():
        print(f"recording the classes of Spark in {path.name}, which takes a minute")
        record(path)


if __name__ == "__main__":
    main()
