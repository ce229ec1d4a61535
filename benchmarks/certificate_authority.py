"""Certificate authority for tests and benchmarks."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class IssuedCertificate:
    """PEM files of one certificate and its key."""

    certificate: Path
    key: Path


class CertificateAuthority:
    """Issues certificates; ``ca`` is the file of the authority's own certificate."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.ca = folder / f"{name}.pem"
        unsigned = self._certificate(self._name, self._key, 0, 10).add_extension(x509.BasicConstraints(True, 0), True)
        self.ca.write_bytes(_pem(unsigned.sign(self._key, hashes.SHA256())))

    def issue(
        self, name: str, *, hosts: tuple[str, ...] = (), uris: tuple[str, ...] = (), from_day: int = -1, to_day: int = 1
    ) -> IssuedCertificate:
        """Issue a certificate for ``name``, in files of that name. The two times of its validity are days from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._certificate(subject, key, from_day, to_day)
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri) for uri in uris]
        for host in hosts:
            try:
                names.append(x509.IPAddress(ipaddress.ip_address(host)))
            except ValueError:
                names.append(x509.DNSName(host))
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), False)
        issued = IssuedCertificate(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        issued.certificate.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))
        issued.key.touch(0o600)
        issued.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return issued

    def _certificate(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, from_day: int, to_day: int
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + from_day * _DAY - datetime.timedelta(minutes=5))
            .not_valid_after(now + to_day * _DAY)
        )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
