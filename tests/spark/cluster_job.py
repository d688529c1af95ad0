"""A job as people submit it: a batch, a stream that is stopped and comes back, and the sink, over a real cluster.

Run by ``test_cluster.py``: source, destination and a directory are its arguments; the last line that it prints is JSON.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from pyspark.sql import SparkSession

from upriver.client import SyncKvClient
from upriver.pipelines.core.session import task_cores
from upriver.spark import describe_offset


def places(_: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Where a task runs, and from where it has the package."""
    import os

    import upriver

    yield os.getcwd(), str(upriver.__file__)


def main(source: str, destination: str, directory: str) -> None:
    spark = SparkSession.builder.getOrCreate()
    batch = spark.read.format("upriver").option("address", source).option("minPartitions", "4")
    told: dict[str, Any] = {"cores": task_cores(spark), "batch": batch.load().count()}
    tasks = spark.sparkContext.range(8, numSlices=8).mapPartitions(places).collect()
    told["executors"], told["files"] = (sorted(set(each)) for each in zip(*tasks, strict=True))

    with SyncKvClient(source) as kv:
        vbuckets = str(kv.cluster_map.vbuckets)

    def follow() -> int:
        stream = spark.readStream.format("upriver").option("address", source).option("maxRowsPerTrigger", "900").load()
        writer = stream.writeStream.format("upriver").option("address", destination).option("mode", "meta")
        writer = writer.option("sourceVbuckets", vbuckets)
        query = writer.option("checkpointLocation", f"{directory}/checkpoint").trigger(availableNow=True).start()
        query.awaitTermination()
        offset = json.loads(query.recentProgress[-1].json)["sources"][0]["endOffset"]
        told["seqnos"] = sum(place["seqno"] for place in describe_offset(json.dumps(offset)).values())
        return sum(progress.numInputRows for progress in query.recentProgress)

    told["first"] = follow()
    with SyncKvClient(source) as kv:
        kv.set_many({f"k{n}": b"again" for n in range(1400, 1700)})
        kv.delete("k8")
    told["after"] = follow()
    print(json.dumps(told))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
