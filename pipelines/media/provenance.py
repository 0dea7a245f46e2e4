"""C2PA manifests: a file's maker, model and time, signed (https://spec.c2pa.org, version 2).

The manifest is in the file and covers its pixels and texts. The certificate must be one that C2PA allows: not
self-signed, with the extended key usage of e-mail protection, document signing or claim signing.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import c2pa
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID
from PIL import Image

from pipelines.request import MediaRequest

MIME_TYPES = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp", "mp4": "video/mp4"}
SOURCE_TYPES = "http://cv.iptc.org/newscodes/digitalsourcetype/"
MADE, CHANGED = f"{SOURCE_TYPES}trainedAlgorithmicMedia", f"{SOURCE_TYPES}compositeWithTrainedAlgorithmicMedia"
"""IPTC's terms for media that a model made from a prompt, and from other media."""
CURVES = {"secp256r1": "es256", "secp384r1": "es384", "secp521r1": "es512"}
MIN_RSA_BITS = 2048
OFFLINE = {"verify_trust": False, "remote_manifest_fetch": False, "ocsp_fetch": False}
WITHOUT_CHECK = MappingProxyType(
    {"verify": {**OFFLINE, "verify_after_sign": False}, "builder": {"thumbnail": {"enabled": False}}}
)
WITH_CHECK = MappingProxyType({**WITHOUT_CHECK, "verify": {**OFFLINE, "verify_after_sign": True}})


@dataclass(frozen=True, kw_only=True, slots=True)
class Credentials:
    algorithm: str
    """Signature algorithm by C2PA's name, such as "es256"."""
    chain: bytes
    """Certificates as PEM, the signer's own first."""
    name: str
    """Common name of the signer's certificate."""
    ends_at: datetime
    """No signature is valid after it."""
    key: bytes
    """PEM."""

    def __repr__(self) -> str:
        return f"Credentials({self.name!r}, {self.algorithm}, until {self.ends_at:%Y-%m-%d})"

    @classmethod
    def read(cls, certificate: Path, key: Path) -> Credentials:
        """Read both files and sign a test picture. ValueError tells which file is unusable, and why."""
        chain, private_key = _certificates(certificate), _private_key(key)
        own = chain[0]
        if _public(private_key) != _public(own):
            others = [other for other in chain[1:] if _public(other) == _public(private_key)]
            cause = "of another one there: put that first" if others else "of none there"
            raise ValueError(f"the key {key} is not that of the first certificate in {certificate}, but {cause}")
        now, ends_at = datetime.now(UTC), min(one.not_valid_after_utc for one in chain)
        if not max(one.not_valid_before_utc for one in chain) <= now < ends_at:
            raise ValueError(f"{certificate} holds a certificate that is not valid today: get a new one")
        credentials = cls(
            algorithm=_algorithm(private_key, key),
            chain=b"".join(one.public_bytes(Encoding.PEM) for one in chain),
            name=_common_name(own),
            ends_at=ends_at,
            key=private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        )
        try:
            writer = ManifestWriter(credentials, "trial", "0", settings=WITH_CHECK)
            writer.sign(_pixel(), "png", model="trial", is_edit=False)
        except c2pa.C2paError as error:
            raise ValueError(f"{certificate} cannot sign C2PA manifests: {error}") from None
        return credentials


class ManifestWriter:
    """Signs files in any thread. ``software`` and ``version`` are the claim's generator."""

    def __init__(
        self, credentials: Credentials, software: str, version: str, *, settings: Mapping[str, Any] = WITHOUT_CHECK
    ) -> None:
        own = c2pa.C2paSignerInfo(credentials.algorithm, credentials.chain, credentials.key, None)
        self._context = c2pa.Context.from_dict(dict(settings), signer=c2pa.Signer.from_info(own))
        self._generator = {"name": software, "version": version}

    def sign_for(self, request: MediaRequest, data: bytes, format: str) -> bytes:
        """Return the file ``data`` of ``request`` with its manifest inside."""
        return self.sign(
            data, format, model=request.model, is_edit=bool(request.num_pictures or request.num_video_frames)
        )

    def sign(self, data: bytes, format: str, *, model: str, is_edit: bool) -> bytes:
        """Return ``data`` with a manifest. ``is_edit``: ``model`` started from other media."""
        action = {
            "action": "c2pa.created",
            "when": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "softwareAgent": self._generator,
            "parameters": {"model": model},
            "digitalSourceType": CHANGED if is_edit else MADE,
        }
        manifest = {
            "claim_generator_info": [self._generator],
            "assertions": [{"label": "c2pa.actions.v2", "created": True, "data": {"actions": [action]}}],
        }
        signed = io.BytesIO()
        with c2pa.Builder(manifest, context=self._context) as builder:
            builder.sign(MIME_TYPES[format], io.BytesIO(data), signed)
        return signed.getvalue()


def signature_of(file: Path) -> dict[str, Any] | None:
    """Return signer and contents of the manifest in ``file``, as plain JSON; None without a manifest.

    ``is_intact``: the file has not changed since. Trust in the signer is not checked.
    """
    context = c2pa.Context.from_dict({"verify": OFFLINE})
    with suppress(c2pa.C2paError):
        reader = c2pa.Reader.try_create(str(file), context=context)
        manifest = None if reader is None else reader.get_active_manifest()
        if reader is None or manifest is None:
            return None
        with reader:
            generator, *_ = manifest.get("claim_generator_info", [{}])
            return {
                "signer": manifest.get("signature_info", {}).get("common_name"),
                "is_intact": reader.get_validation_state() != "Invalid",
                "software": " ".join(str(generator[name]) for name in ("name", "version") if name in generator),
                "actions": _actions(manifest),
            }
    return None


def _actions(manifest: Mapping[str, Any]) -> list[Any]:
    labelled = (one for one in manifest.get("assertions", ()) if one["label"].startswith("c2pa.actions"))
    return [action for assertion in labelled for action in assertion["data"]["actions"]]


def _certificates(file: Path) -> list[x509.Certificate]:
    data = _read(file)
    with suppress(ValueError):
        return x509.load_pem_x509_certificates(data)
    raise ValueError(f"{file} holds no certificates in PEM form (-----BEGIN CERTIFICATE-----)")


def _private_key(file: Path) -> Any:
    data = _read(file)
    try:
        return load_pem_private_key(data, None)
    except TypeError:
        raise ValueError(f"the key {file} has a password, which a server cannot type: write it without one") from None
    except ValueError:
        raise ValueError(f"{file} holds no private key in PEM form (-----BEGIN PRIVATE KEY-----)") from None


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None


def _algorithm(key: Any, file: Path) -> str:
    """Return C2PA's name for the signatures of ``key``."""
    match key:
        case ec.EllipticCurvePrivateKey() if key.curve.name in CURVES:
            return CURVES[key.curve.name]
        case rsa.RSAPrivateKey() if key.key_size >= MIN_RSA_BITS:
            return "ps256"
        case ed25519.Ed25519PrivateKey():
            return "ed25519"
    allowed = f"an EC key on P-256, P-384 or P-521, Ed25519, or RSA of {MIN_RSA_BITS} bits or more"
    raise ValueError(f"the key {file} is of a kind that C2PA does not allow; it must be {allowed}")


def _public(holder: Any) -> bytes:
    encoded: bytes = holder.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return encoded


def _common_name(certificate: x509.Certificate) -> str:
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else certificate.subject.rfc4514_string()


def _pixel() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (1, 1)).save(buffer, "png")
    return buffer.getvalue()
