"""A certificate authority for tests, and its certificates, as files in PEM form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAY = timedelta(days=1)
KEYS: dict[str, Callable[[], CertificateIssuerPrivateKeyTypes]] = {
    "es256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "es384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "ps256": lambda: rsa.generate_private_key(65537, 2048),
    "ed25519": ed25519.Ed25519PrivateKey.generate,
}


@dataclass(frozen=True, kw_only=True)
class Issued:
    """A chain and its key, in files."""

    certificate: Path
    key: Path


class Authority:
    """Issues certificates into ``folder``; its own is ``anchor``."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._key = folder, KEYS["es256"]()
        self._own = self._certificate("A test's authority", self._key, days=(-2, 9), usage=None)
        self.anchor = self._own.public_bytes(Encoding.PEM).decode()

    def issue(
        self,
        name: str = "signer",
        *,
        kind: str = "es256",
        days: tuple[int, int] = (-1, 8),
        usage: x509.ObjectIdentifier = ExtendedKeyUsageOID.EMAIL_PROTECTION,
        password: bytes = b"",
        key: Any = None,
    ) -> Issued:
        """Issue a certificate that is valid for ``days`` from now."""
        key = key or KEYS[kind]()
        own = self._certificate(name, key, days=days, usage=usage)
        issued = Issued(certificate=self._folder / f"{name}.pem", key=self._folder / f"{name}.key")
        issued.certificate.write_bytes(own.public_bytes(Encoding.PEM) + self._own.public_bytes(Encoding.PEM))
        encryption = BestAvailableEncryption(password) if password else NoEncryption()
        issued.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
        return issued

    def self_signed(self) -> Issued:
        """Return the authority's own certificate, with its key."""
        issued = Issued(certificate=self._folder / "root.pem", key=self._folder / "root.key")
        issued.certificate.write_text(self.anchor)
        issued.key.write_bytes(self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return issued

    def _certificate(
        self, name: str, key: Any, *, days: tuple[int, int], usage: x509.ObjectIdentifier | None
    ) -> x509.Certificate:
        is_authority, now = usage is None, datetime.now(UTC)
        flags = dict.fromkeys(
            ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only"), False
        )
        key_usage = x509.KeyUsage(
            **flags,
            digital_signature=not is_authority,
            key_cert_sign=is_authority,
            crl_sign=is_authority,
            decipher_only=False,
        )
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(_name("A test's authority"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + days[0] * DAY)
            .not_valid_after(now + days[1] * DAY)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(key_usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        if usage is not None:
            builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        return builder.sign(self._key, hashes.SHA256())


def _name(text: str) -> x509.Name:
    organization = x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Tests")
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text), organization])
