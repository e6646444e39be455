"""The certificate of a control service, made when it starts. Clients trust only the one in control.json.

A gRPC port has either plain text or TLS. On the loopback device, which other machines cannot reach, there is no TLS.
"""

from __future__ import annotations

import os
import ssl
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import grpc

NAME = "pentad"  # the same for every service: clients do not identify it by name
_VALID = timedelta(days=3650)  # may be long, as it is useless once the service has ended


class Certificate(NamedTuple):
    """A private key and its certificate as PEM. The key never leaves this process."""

    key: bytes
    text: bytes

    @property
    def credentials(self) -> grpc.ServerCredentials:
        return grpc.ssl_server_credentials([self])

    @property
    def context(self) -> ssl.SSLContext:
        """The TLS context for a Python server. It can only read the key from a file, so this uses one in memory."""
        made, file = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), os.memfd_create("certificate")
        try:
            os.write(file, self.key + self.text)
            made.load_cert_chain(f"/proc/self/fd/{file}")
        finally:
            os.close(file)
        return made


def make_certificate() -> Certificate:
    from cryptography import x509  # takes 0.1 s, and most services need no certificate
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME)])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # clocks of other machines may be behind
        .not_valid_after(now + _VALID)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    return Certificate(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain), made.public_bytes(pem))


def require_certificate(text: str) -> None:
    """Raises ValueError unless the text is a certificate; gRPC would complain about it on stderr."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (ssl.SSLError, TypeError) as error:
        raise ValueError(f"no certificate: {error}") from None


def open_channel(address: str, certificate: str | None, options: tuple[tuple[str, object], ...]) -> grpc.Channel:
    """A channel to a service with this certificate, as PEM (None: without TLS)."""
    if certificate is None:
        return grpc.insecure_channel(address, options)
    credentials = grpc.ssl_channel_credentials(certificate.encode())
    return grpc.secure_channel(address, credentials, (*options, ("grpc.ssl_target_name_override", NAME)))
