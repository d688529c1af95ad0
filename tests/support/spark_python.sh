#!/bin/sh
# The Python that Spark starts in tests. Spark puts PySpark as a zip file of sources first on the path of each Python
# that it starts, and Python compiles them each time. Without it a process takes the installed PySpark, which is compiled,
# and starts in a third of the time.
kept=
IFS=:
for entry in $PYTHONPATH; do
  case $entry in
    */pyspark.zip | */py4j-*.zip | */spark-core_*.jar) ;;
    *) kept=$kept${kept:+:}$entry ;;
  esac
done
PYTHONPATH=$kept exec "$UPRIVER_TEST_PYTHON" "$@"
