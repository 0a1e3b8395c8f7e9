"""Keys of a cluster: its CA, a certificate for each node, the list of revoked keys.

A certificate names the node (CN), the cluster (O), and a DNS name that is unique to that node of that cluster (`target_name`). A client
demands this DNS name, so TLS itself rejects another node, another cluster and revoked keys.

The file `revoked`, next to the certificates, has a line `NODE COUNT` for each node whose keys were revoked. A certificate has one DNS name
for each count up to that at its issue; it is valid if it has the name of the current count. So keys can be revoked without having them. The
list is as trusted as ca.pem next to it. Running nodes read it again when it changes.

Invariants:
- Private keys have mode 0600. Keys are never overwritten.

Crash safety: files appear whole or not at all; the next run names those that exist.
"""

import datetime
import functools
import hashlib
import ipaddress
import logging
import os
import re
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckptfs import limits
from ckptfs.errors import ConfigError, InvalidArgument

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

log = logging.getLogger(__name__)
CA_CERTIFICATE, CA_KEY = "ca.pem", "ca.key"
NODE_CERTIFICATE, NODE_KEY = "node.pem", "node.key"
CA_DAYS, NODE_DAYS = 3650, 1825
SKEW = datetime.timedelta(days=1)
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
REVOKED_FILE = "revoked"
REVOCATIONS_MAX = 1000


@dataclass(frozen=True, slots=True)
class Identity:
    """The credentials of a node, in PEM. `expires` is when the first of its certificates does."""

    node: str
    cluster: str
    ca: bytes
    certificate: bytes
    key: bytes
    expires: datetime.datetime


def target_name(cluster: str, node: str, revocations: int = 0) -> str:
    """Return the unique DNS name of a node of a cluster, after this number of revocations."""
    words = f"{cluster}/{node}" + (f"/{revocations}" if revocations else "")
    return f"n-{hashlib.sha256(words.encode()).hexdigest()[:40]}.ckptfs"


def init(directory: Path, cluster: str) -> None:
    """Create the CA of `cluster` in `directory`. Raises InvalidArgument if there is one."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    _check_name(cluster, "cluster")
    _check_absent(directory / CA_CERTIFICATE, directory / CA_KEY)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    name = _build_name(cluster, f"{cluster} CA")
    certificate = _build_certificate(name, name, key, CA_DAYS, authority=True).sign(key, hashes.SHA256())
    _write_new_file(directory / CA_KEY, _encode_key(key), 0o600)
    _write_new_file(directory / CA_CERTIFICATE, _encode_certificate(certificate), 0o644)


def issue(directory: Path, node: str, addresses: Sequence[str] = ()) -> Path:
    """Create DIRECTORY/NODE with the keys of `node`. Its certificate also names the hosts `addresses`."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    _check_name(node, "node")
    try:
        ca = x509.load_pem_x509_certificate((directory / CA_CERTIFICATE).read_bytes())
        ca_key = serialization.load_pem_private_key((directory / CA_KEY).read_bytes(), None)
    except FileNotFoundError as failure:
        raise InvalidArgument(f"{directory} has no keys of a cluster", remedy="create them with `ckptfs keys init`") from failure
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    target = directory / node
    _check_absent(*(target / name for name in (CA_CERTIFICATE, NODE_CERTIFICATE, NODE_KEY)))
    key = ec.generate_private_key(ec.SECP256R1())
    _, cluster = _get_node_and_cluster(ca)
    known = read_revocations(directory)
    own = [x509.DNSName(target_name(cluster, node, count)) for count in range(known.get(node, 0) + 1)]
    names = x509.SubjectAlternativeName([*own, *map(_parse_address, addresses)])
    builder = _build_certificate(_build_name(cluster, node), ca.subject, key, NODE_DAYS, authority=False).add_extension(
        names, critical=False
    )
    certificate = builder.sign(ca_key, hashes.SHA256())
    target.mkdir(mode=0o700, exist_ok=True)
    _write_new_file(target / NODE_KEY, _encode_key(key), 0o600)
    _write_new_file(target / CA_CERTIFICATE, _encode_certificate(ca), 0o644)
    _write_new_file(target / NODE_CERTIFICATE, _encode_certificate(certificate), 0o644)
    if known:
        write_revocations(target, known)
    return target


def revoke(directory: Path, node: str) -> list[Path]:
    """Revoke all keys of `node` so far, and rename their directory. Return the lists to distribute."""
    _check_name(node, "node")
    if not (directory / CA_KEY).exists():
        raise InvalidArgument(f"{directory} has no keys of a cluster", remedy="give the directory where `ckptfs keys init` created them")
    known = read_revocations(directory)
    known[node] = known.get(node, 0) + 1
    directories = [directory, *sorted(path.parent for path in directory.glob(f"[!.]*/{NODE_CERTIFICATE}"))]
    for place in directories:
        write_revocations(place, known)
    if (directory / node).exists():
        os.rename(directory / node, directory / f".{node}.revoked-{known[node]}")
    return [place / REVOKED_FILE for place in directories if place.name != node]


def load(directory: Path) -> Identity:
    """Load the keys of a node. Raises ConfigError, which names what is wrong."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    try:
        ca, certificate, key = ((directory / name).read_bytes() for name in (CA_CERTIFICATE, NODE_CERTIFICATE, NODE_KEY))
    except OSError as failure:
        raise ConfigError(
            f"the keys cannot be read: {failure}", remedy="create the directory of a node with `ckptfs keys issue`"
        ) from failure
    if os.stat(directory / NODE_KEY).st_mode & 0o077:
        raise ConfigError(f"{directory / NODE_KEY} is open to others", remedy=f"chmod 600 {directory / NODE_KEY}")
    try:
        parsed, authority = x509.load_pem_x509_certificate(certificate), x509.load_pem_x509_certificate(ca)
        parsed.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature) as failure:
        raise ConfigError(f"{directory / NODE_CERTIFICATE} is not a certificate of the CA in {directory / CA_CERTIFICATE}") from failure
    expires = min(parsed.not_valid_after_utc, authority.not_valid_after_utc)
    if expires <= datetime.datetime.now(datetime.UTC):
        raise ConfigError(f"the certificate in {directory} expired on {expires:%Y-%m-%d}", remedy="issue a new one with ckptfs keys issue")
    _check_key_matches(directory)
    if not is_current(certificate, read_revocations(directory)):
        remedy = "issue new ones with `ckptfs keys issue` on the machine where they were revoked"
        raise ConfigError(f"the keys in {directory} were revoked", remedy=remedy)
    return Identity(*_get_node_and_cluster(parsed), ca, certificate, key, expires)


def load_for(directory: Path, node: str, cluster: str) -> Identity:
    """Load the keys of this node. Raises ConfigError if they are unusable, or of another node or cluster."""
    identity = load(directory)
    if (identity.node, identity.cluster) != (node, cluster):
        whose = f"node {identity.node} of cluster {identity.cluster}"
        remedy = "give node and cluster as in the keys, or issue new keys"
        raise ConfigError(f"{directory} has the keys of {whose}, and this is node {node} of cluster {cluster}", remedy=remedy)
    return identity


@functools.lru_cache(maxsize=1024)
def get_subject(pem: bytes) -> tuple[str, str]:
    """Return (node, cluster) of a certificate; empty if it names none. TLS has checked its signature."""
    from cryptography import x509

    return _get_node_and_cluster(x509.load_pem_x509_certificate(pem))


@functools.lru_cache(maxsize=1024)
def _get_dns_names(pem: bytes) -> frozenset[str]:
    from cryptography import x509

    try:
        extension = x509.load_pem_x509_certificate(pem).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return frozenset()
    return frozenset(extension.value.get_values_for_type(x509.DNSName))


def is_current(pem: bytes, revocations: Mapping[str, int]) -> bool:
    """Return True if a certificate was issued after the last revocation of its node."""
    node, cluster = get_subject(pem)
    count = revocations.get(node, 0)
    return not count or target_name(cluster, node, count) in _get_dns_names(pem)


def read_revocations(directory: Path) -> dict[str, int]:
    """Return {node: number of revocations}; empty without a list. Raises ConfigError."""
    path = directory / REVOKED_FILE
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as failure:
        raise ConfigError(f"{path} cannot be read: {failure}") from failure
    found: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        node, _, count = line.strip().partition(" ")
        if not (count.isascii() and count.isdigit() and 0 < int(count) <= REVOCATIONS_MAX):
            remedy = "copy it again from the machine where `ckptfs keys revoke` ran"
            raise ConfigError(f"{path}: line {number} is not NODE COUNT: {line[:80]!r}", remedy=remedy)
        found[node] = int(count)
    return found


def write_revocations(directory: Path, revoked: dict[str, int]) -> None:
    """Replace the list in `directory`, atomically."""
    temporary = directory / f".{REVOKED_FILE}.{os.getpid()}"
    with open(temporary, "w") as file:
        file.writelines(f"{node} {count}\n" for node, count in sorted(revoked.items()))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, directory / REVOKED_FILE)


class RevocationList:
    """The current list, read again when its file changes. Safe for several threads."""

    def __init__(self, directory: Path | None) -> None:
        """Watch `directory`, which has the keys of the node; None for a node without keys."""
        self._directory = directory
        self._lock = threading.Lock()
        self._checked_s = -limits.REVOKED_POLL_S
        self._file_state: object = None
        self._counts: dict[str, int] = {}

    def get_counts(self) -> dict[str, int]:
        """Return {node: number of revocations}; the last known one while the file cannot be read."""
        with self._lock:
            if self._directory is not None and time.monotonic() - self._checked_s >= limits.REVOKED_POLL_S:
                self._reload_if_changed(self._directory)
                self._checked_s = time.monotonic()
            return self._counts

    def _reload_if_changed(self, directory: Path) -> None:
        try:
            found = os.stat(directory / REVOKED_FILE)
            seen: object = (found.st_mtime_ns, found.st_ino, found.st_size)
        except OSError as failure:
            seen = failure.errno
        if seen == self._file_state:
            return
        self._file_state = seen
        try:
            self._counts = read_revocations(directory)
        except ConfigError as failure:
            log.warning("revoked: the list is not reloaded: %s; the last known one stays in force", failure)


def _check_name(name: str, what: str) -> None:
    if not NAME_PATTERN.fullmatch(name):
        raise InvalidArgument(
            f"{name!r} cannot name a {what}; accepted: up to 63 letters, digits, '.', '_' and '-', a letter or digit first"
        )


def _check_absent(*paths: Path) -> None:
    for path in paths:
        if path.exists():
            raise InvalidArgument(f"{path} exists, and keys are never overwritten", remedy="remove it first if it is no longer needed")


def _check_key_matches(directory: Path) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(directory / NODE_CERTIFICATE, directory / NODE_KEY)
    except (ssl.SSLError, OSError) as failure:
        raise ConfigError(f"{directory / NODE_KEY} is not the key of {directory / NODE_CERTIFICATE}") from failure


def _build_name(cluster: str, common: str) -> "x509.Name":
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, cluster), x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _get_node_and_cluster(certificate: "x509.Certificate") -> tuple[str, str]:
    from cryptography.x509.oid import NameOID

    node, cluster = map(certificate.subject.get_attributes_for_oid, (NameOID.COMMON_NAME, NameOID.ORGANIZATION_NAME))
    return str(node[0].value) if node else "", str(cluster[0].value) if cluster else ""


def _parse_address(text: str) -> "x509.GeneralName":
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,253}", text):
            raise InvalidArgument(f"{text!r} is neither a host name nor an IP address") from None
        return x509.DNSName(text)


def _build_certificate(
    name: "x509.Name", issuer: "x509.Name", key: "ec.EllipticCurvePrivateKey", days: int, *, authority: bool
) -> "x509.CertificateBuilder":
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(issuer, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - SKEW).not_valid_after(now + datetime.timedelta(days=days))
    builder = builder.add_extension(x509.BasicConstraints(authority, 0 if authority else None), critical=True)
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only", "decipher_only")
    usage = dict.fromkeys(others, False)
    builder = builder.add_extension(
        x509.KeyUsage(digital_signature=not authority, key_cert_sign=authority, crl_sign=authority, **usage), critical=True
    )
    if authority:
        return builder
    return builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)


def _encode_certificate(certificate: "x509.Certificate") -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _encode_key(key: "ec.EllipticCurvePrivateKey") -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write_new_file(path: Path, data: bytes, mode: int) -> None:
    """Create a file atomically; never replace one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        os.fchmod(fd, mode)
        os.write(fd, data)
        os.fsync(fd)
        os.link(temporary, path)
    except FileExistsError as failure:
        raise InvalidArgument(f"{path} exists, and keys are never overwritten") from failure
    finally:
        os.close(fd)
        os.unlink(temporary)
