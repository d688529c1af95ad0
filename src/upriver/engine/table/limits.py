"""Limits of keys, values and numbers, as clients may send them. The compiled table has the same ones."""

from typing import Final

KEY_BYTES_MAX: Final = 250
VALUE_BYTES_MAX: Final = 20 * 2**20
#: Expiries up to this many seconds are relative to now, as memcached defines it.
RELATIVE_EXPIRY_S_MAX: Final = 30 * 24 * 3600
EXPIRY_MAX: Final = 2**32 - 1
#: The CAS that a locked item shows to everybody but the owner of the lock.
LOCKED_CAS: Final = 2**64 - 1


def absolute(expiry: int, now: float) -> int:
    """Memcached's rule: up to 30 days an expiry counts from now, above that from the epoch.

    A time beyond the last second that a record can hold becomes that second.
    """
    if 0 < expiry <= RELATIVE_EXPIRY_S_MAX:
        return min(EXPIRY_MAX, expiry + int(now))
    return expiry
