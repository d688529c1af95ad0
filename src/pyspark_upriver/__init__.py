"""Makes ``spark.read.format("upriver")`` work without registration: Spark looks for modules with such a name.

A module of this kind that cannot be imported breaks the lookup for all of them. So only what the class itself needs is
imported here; the rest is imported on first use.
"""

from upriver.spark import UpriverDataSource as DefaultSource

__all__ = ["DefaultSource"]
