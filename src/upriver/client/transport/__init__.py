"""One connection to one node: addresses, the handshake, requests and their replies, retries, synchronous calls."""

from upriver.client.transport.address import Address, Endpoint
from upriver.client.transport.backoff import PATIENCE_S, Backoff
from upriver.client.transport.connection import Connection
from upriver.client.transport.sync import LoopThread

__all__ = ["PATIENCE_S", "Address", "Backoff", "Connection", "Endpoint", "LoopThread"]
