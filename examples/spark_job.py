"""Count the fields of all documents: a batch job over the latest state of a cluster.

spark-submit spark_job.py 127.0.0.1:11210
"""

import sys

from pyspark.sql import SparkSession

from upriver.spark import latest

spark = SparkSession.builder.appName("fields").getOrCreate()
changes = spark.read.format("upriver").option("address", sys.argv[1]).option("valueFormat", "string").load()
fields = latest(changes).selectExpr("explode(json_object_keys(value)) AS field")
for row in fields.groupBy("field").count().orderBy("field").collect():
    print(row["field"], row["count"])
