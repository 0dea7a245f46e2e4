"""C2PA's own reader sees the manifests, and unusable credentials are refused."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import av
import c2pa
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID

from pipelines.media.encode import encode_frames
from pipelines.media.provenance import MIME_TYPES, Credentials, ManifestWriter
from tests.support.certificates import KEYS, Authority, Issued

FRAMES = np.random.default_rng(0).integers(0, 256, (1, 32, 48, 3), dtype=np.uint8)
IPTC = "http://cv.iptc.org/newscodes/digitalsourcetype"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def read_manifest(data: bytes, format: str, anchor: str) -> tuple[dict[str, Any], str]:
    """Return the active manifest, and the result of its validation with ``anchor`` as the only trust."""
    trust = {"trust": {"user_anchors": anchor}, "verify": {"remote_manifest_fetch": False}}
    with c2pa.Reader(MIME_TYPES[format], io.BytesIO(data), context=c2pa.Context.from_dict(trust)) as reader:
        return reader.get_active_manifest(), reader.get_validation_state()


def writer(issued: Issued) -> ManifestWriter:
    return ManifestWriter(Credentials.read(issued.certificate, issued.key), "Troupe", "1.2.3")


@pytest.mark.parametrize("format", MIME_TYPES)
def test_a_file_says_who_has_made_it_with_what_and_when(authority: Authority, format: str) -> None:
    plain = encode_frames(FRAMES, format, fps=8)  # type: ignore[arg-type]
    signed = writer(authority.issue("Paint Inc")).sign(plain, format, model="flux-shapes", is_edit=False)
    manifest, state = read_manifest(signed, format, authority.anchor)
    assert state == "Trusted"
    assert manifest["signature_info"]["common_name"] == "Paint Inc"
    (generator,) = manifest["claim_generator_info"]
    assert (generator["name"], generator["version"]) == ("Troupe", "1.2.3")
    (assertion,) = (one for one in manifest["assertions"] if one["label"].startswith("c2pa.actions"))
    (action,) = assertion["data"]["actions"]
    assert (assertion["label"], action["action"]) == ("c2pa.actions.v2", "c2pa.created")
    assert action["digitalSourceType"] == f"{IPTC}/trainedAlgorithmicMedia"
    assert (action["softwareAgent"]["name"], action["parameters"]["model"]) == ("Troupe", "flux-shapes")
    assert abs(datetime.fromisoformat(action["when"]) - datetime.now(UTC)) < timedelta(days=1)
    with av.open(io.BytesIO(signed), "r") as one, av.open(io.BytesIO(plain), "r") as other:
        pictures = [
            np.stack([frame.to_ndarray(format="rgb24") for frame in each.decode(video=0)]) for each in (one, other)
        ]
    np.testing.assert_array_equal(pictures[0], pictures[1])


def test_the_action_belongs_to_what_the_signer_has_made(authority: Authority) -> None:
    """Readers believe a mark less if it is among gathered assertions."""
    signed = writer(authority.issue()).sign(encode_frames(FRAMES, "png"), "png", model="m", is_edit=True)
    detailed = json.loads(c2pa.Reader("image/png", io.BytesIO(signed)).detailed_json())
    (manifest,) = detailed["manifests"].values()
    created = [one["url"].rpartition("/")[2] for one in manifest["claim"]["created_assertions"]]
    assert "c2pa.actions.v2" in created
    (action,) = manifest["assertion_store"]["c2pa.actions.v2"]["actions"]
    assert action["digitalSourceType"] == f"{IPTC}/compositeWithTrainedAlgorithmicMedia"


def test_a_changed_file_and_another_authority_are_noticed(authority: Authority, tmp_path: Path) -> None:
    signed = writer(authority.issue()).sign(encode_frames(FRAMES, "png"), "png", model="m", is_edit=False)
    place = signed.index(b"IDAT") + 40
    changed = signed[:place] + bytes([signed[place] ^ 1]) + signed[place + 1 :]
    assert read_manifest(changed, "png", authority.anchor)[1] == "Invalid"
    assert read_manifest(signed, "png", Authority(tmp_path).anchor)[1] == "Valid", "the signer is not trusted"


@pytest.mark.parametrize("kind", KEYS)
def test_keys_of_each_kind_sign_in_many_threads(authority: Authority, kind: str) -> None:
    manifests, plain = writer(authority.issue(kind=kind)), encode_frames(FRAMES, "png")
    with ThreadPoolExecutor(8) as threads:
        files = threads.map(lambda index: manifests.sign(plain, "png", model=f"m{index}", is_edit=False), range(16))
        for index, file in enumerate(files):
            manifest, state = read_manifest(file, "png", authority.anchor)
            assert state == "Trusted"
            assert manifest["assertions"][0]["data"]["actions"][0]["parameters"]["model"] == f"m{index}"


Faulty = Callable[[Authority], Issued]


def mixed(certificate: Issued, key: Issued) -> Issued:
    return Issued(certificate=certificate.certificate, key=key.key)


def reversed_chain(authority: Authority) -> Issued:
    issued = authority.issue()
    own, root = issued.certificate.read_text().split("-----END CERTIFICATE-----\n", 1)
    issued.certificate.write_text(f"{root}{own}-----END CERTIFICATE-----\n")
    return issued


FAULTS: dict[str, tuple[Faulty, str]] = {
    "of another certificate": (lambda ca: mixed(ca.issue(), ca.issue("b")), "b.key is not that of the first .*of none"),
    "in the wrong order": (reversed_chain, "of another one there: put that first"),
    "over": (lambda ca: ca.issue(days=(-2, -1)), "signer.pem holds a certificate that is not valid today"),
    "not yet valid": (lambda ca: ca.issue(days=(1, 3)), "signer.pem holds a certificate that is not valid today"),
    "with a password": (lambda ca: ca.issue(password=b"secret"), "signer.key has a password"),
    "for servers": (lambda ca: ca.issue(usage=ExtendedKeyUsageOID.SERVER_AUTH), "signer.pem cannot sign C2PA"),
    "self-signed": (lambda ca: ca.self_signed(), "root.pem cannot sign C2PA manifests: .*self-signed"),
    "on a curve of its own": (
        lambda ca: ca.issue(key=ec.generate_private_key(ec.SECP256K1())),
        "P-256, P-384 or P-521",
    ),
    "too short": (lambda ca: ca.issue(key=rsa.generate_private_key(65537, 1024)), "RSA of 2048 bits or more"),
    "no certificate": (
        lambda ca: Issued(certificate=ca.issue().key, key=ca.issue().key),
        "holds no certificates in PEM",
    ),
    "no key": (
        lambda ca: Issued(certificate=ca.issue().certificate, key=ca.issue().certificate),
        "no private key in PEM",
    ),
    "not there": (
        lambda ca: Issued(certificate=Path("/nowhere/a.pem"), key=ca.issue().key),
        "/nowhere/a.pem cannot be",
    ),
}


@pytest.mark.parametrize(("faulty", "message"), FAULTS.values(), ids=FAULTS)
def test_credentials_that_cannot_sign(authority: Authority, faulty: Faulty, message: str) -> None:
    issued = faulty(authority)
    with pytest.raises(ValueError, match=message) as caught:
        Credentials.read(issued.certificate, issued.key)
    assert not any(line in str(caught.value) for line in issued.key.read_text().splitlines())


def test_a_key_is_in_no_text(authority: Authority) -> None:
    issued = authority.issue("Paint Inc")
    credentials = Credentials.read(issued.certificate, issued.key)
    assert repr(credentials).startswith("Credentials('Paint Inc', es256, until ")
    for line in issued.key.read_text().splitlines():
        assert line not in f"{credentials!r} {credentials}"
