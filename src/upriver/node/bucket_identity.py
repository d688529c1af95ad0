"""The identity of the bucket in a data directory: its name, and the uuid that clients recognise after a restart."""

import json
import secrets
from pathlib import Path
from typing import Final

from upriver.errors import StorageError
from upriver.files import storage_errors, write_atomically

#: The file in the data directory.
BUCKET_FILE: Final = "bucket.json"


def bucket_uuid(data: Path | None, name: str) -> str:
    """Return the uuid of the bucket; raise ``StorageError`` if the directory holds another bucket."""
    fresh = secrets.token_hex(16)
    if data is None:
        return fresh
    path = data / BUCKET_FILE
    try:
        with storage_errors(path):
            if not path.exists():
                write_atomically(path, json.dumps({"name": name, "uuid": fresh}).encode())
                return fresh
            kept = json.loads(path.read_bytes())
        kept_name, kept_uuid = kept["name"], kept["uuid"]
    except (ValueError, KeyError, TypeError):
        raise StorageError(
            str(path), "invalid bucket identity; remove the file to give the bucket a new uuid"
        ) from None
    if kept_name != name:
        raise StorageError(
            str(data), f"the directory holds bucket {kept_name!r}, not {name!r}; use --bucket {kept_name}"
        )
    return str(kept_uuid)
