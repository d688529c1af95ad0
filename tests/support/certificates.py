"""Certificates for tests."""

import ssl
from pathlib import Path

import trustme

from upriver.node.tls_transport import server_context


class CertificateAuthority:
    """A certificate authority, the node's certificate from it, and contexts for clients that trust it."""

    def __init__(self, directory: Path) -> None:
        self.authority = trustme.CA()
        issued = self.authority.issue_cert("localhost", "127.0.0.1")
        self.cert, self.key = directory / "cert.pem", directory / "key.pem"
        self.key.write_bytes(issued.private_key_pem.bytes())
        self.cert.write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
        self.server = server_context(str(self.cert), str(self.key))

    def client(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        return context
