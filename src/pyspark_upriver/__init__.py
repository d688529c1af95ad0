"""What makes ``spark.read.format("upriver")`` work without registration: Spark looks for modules of this name.

One module of this kind that cannot be imported breaks the lookup for all of them, so nothing is imported here but what
the class itself needs; everything else comes with the first use.
"""

from upriver.spark import UpriverDataSource as DefaultSource

__all__ = ["DefaultSource"]
