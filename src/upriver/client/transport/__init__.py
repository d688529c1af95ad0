"""One connection to one node: addresses, the handshake, requests and their replies, retries, synchronous calls."""
