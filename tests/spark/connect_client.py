"""A client of Spark Connect, without a virtual machine of its own: a batch of documents, and a stream that comes back.

Run by ``test_connect.py``: server, source, destination and a directory are its arguments; it prints JSON.
"""

import json
import sys
from typing import Any

from pyspark.sql import SparkSession

from upriver.client import SyncKvClient
from upriver.spark import changes, latest


def main(server: str, source: str, destination: str, directory: str) -> None:
    spark = SparkSession.builder.remote(server).getOrCreate()
    reader = spark.read.format("upriver").option("address", source).option("valueFormat", "json")
    people = changes(latest(reader.option("valueSchema", "name string").load()))
    told: dict[str, Any] = {"names": sorted(row["name"] for row in people.select("key", "value.name").collect())}

    with SyncKvClient(source) as kv:
        vbuckets = str(kv.cluster_map.vbuckets)

    def follow() -> None:
        stream = spark.readStream.format("upriver").option("address", source).load()
        writer = stream.writeStream.format("upriver").option("address", destination).option("mode", "meta")
        writer = writer.option("sourceVbuckets", vbuckets)
        query = writer.option("checkpointLocation", f"{directory}/checkpoint").trigger(availableNow=True).start()
        query.awaitTermination()

    follow()
    with SyncKvClient(source) as kv:
        kv.set("c", b'{"name": "Cid"}')
        kv.delete("b")
    follow()
    rows = spark.createDataFrame([(b"d", b"written")], "key binary, value binary")
    rows.write.format("upriver").option("address", destination).mode("append").save()
    told["connect"] = type(spark).__module__
    print(json.dumps(told))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
