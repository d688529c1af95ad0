"""An S3 stand-in (moto) in a thread of the test process, on the loopback interface."""

import logging
import uuid
from collections.abc import Iterator
from urllib.request import Request, urlopen

import pytest
from moto.server import ThreadedMotoServer

from upriver.tables import TableStorage


class ObjectStore:
    """A bucket, and the options with which Upriver and delta-rs use it."""

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
        self._server.start()
        self.endpoint = f"http://127.0.0.1:{self._server.get_host_and_port()[1]}"
        self.options = {
            "aws_endpoint": self.endpoint,
            "aws_access_key_id": "key",
            "aws_secret_access_key": "secret",
            "aws_region": "us-east-1",
            "allow_http": "true",
        }
        with urlopen(Request(f"{self.endpoint}/tables", method="PUT")):
            pass

    def new_storage(self) -> TableStorage:
        """The storage of a table that does not exist yet."""
        return TableStorage.of(f"s3://tables/{uuid.uuid4()}", self.options)

    def stop(self) -> None:
        self._server.stop()


@pytest.fixture(scope="session")
def object_store() -> Iterator[ObjectStore]:
    store = ObjectStore()
    yield store
    store.stop()
