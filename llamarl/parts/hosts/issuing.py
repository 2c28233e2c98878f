"""`Authority`: issues certificates, with the package `cryptography`."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from llamarl.config import ConfigError
from llamarl.parts.hosts.home import is_ip

CLOCKS_APART = timedelta(minutes=5)
"""How far the clock of a host may be behind, so that a new certificate is valid there, too."""
_NO_USE = dict.fromkeys(
    (
        "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
        "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
    ),
    False,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Authority:
    """The authority of a run: its own certificate, and the key that signs the others."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @staticmethod
    def new(folder: Path, days: int) -> Authority:
        """Creates an authority and writes `ca.crt` and `ca.key` into a folder. Raises OSError."""
        name, key = _named("llamarl"), ec.generate_private_key(ec.SECP256R1())
        builder = _begun(name, name, key.public_key(), days)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        uses = x509.KeyUsage(**_NO_USE | {"key_cert_sign": True, "crl_sign": True})
        builder = builder.add_extension(uses, critical=True)
        certificate = builder.sign(key, hashes.SHA256())
        _write(folder, "ca", certificate, key)
        return Authority(certificate, key)

    @staticmethod
    def read(folder: Path) -> Authority:
        """Reads `ca.crt` and `ca.key`. Raises OSError, and ConfigError if they are damaged or another kind of key."""
        try:
            certificate = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
            key = load_pem_private_key((folder / "ca.key").read_bytes(), password=None)
        except (ValueError, TypeError):
            raise ConfigError(f"{folder}: ca.crt or ca.key is damaged; make certificates in a new folder") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise ConfigError(f"{folder}: ca.key is not the key of ca.crt; make certificates in a new folder")
        return Authority(certificate, key)

    def issue(self, folder: Path, name: str, names: Sequence[str], days: int) -> None:
        """Writes a new key and its certificate for DNS names and IP addresses into a folder. Raises OSError."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _begun(_named(name), self.certificate.subject, key.public_key(), days)
        alternatives = [
            x509.IPAddress(ipaddress.ip_address(one)) if is_ip(one) else x509.DNSName(one)
            for one in dict.fromkeys(names)
        ]
        builder = (
            builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.KeyUsage(**_NO_USE | {"digital_signature": True}), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
        )
        _write(folder, name, builder.sign(self.key, hashes.SHA256()), key)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _begun(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    end = now + timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, end) - CLOCKS_APART)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _write(folder: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    path = folder / f"{name}.key"
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (folder / f"{name}.crt").write_bytes(certificate.public_bytes(Encoding.PEM))
