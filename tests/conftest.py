"""How property tests run: without a deadline, because machines are loaded, and in CI the same way each time."""

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "upriver", deadline=None, derandomize=bool(os.environ.get("CI")), suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("upriver")
