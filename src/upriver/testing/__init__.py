"""For people who test their own consumers: the pytest plugin with the fixture ``upriver_node``."""
