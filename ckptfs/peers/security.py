"""Authentication between nodes: gRPC credentials and callers.

A caller is identified by the node name in its certificate, which must be from the CA of this cluster and not revoked. A client demands the
unique DNS name of the node that it means. Without keys, a caller names itself and only loopback is allowed.

A caller states the version of the protocol with each call. Another version than this node's is refused, with a message that names both.
"""

import grpc

from ckptfs.clique.certificates import NAME_PATTERN, Identity, RevocationList, get_subject, is_current
from ckptfs.peers.messages import PROTOCOL_VERSION, Rejection, RejectReason

NODE_METADATA = "ckptfs-node"
CLUSTER_METADATA = "ckptfs-cluster"
VERSION_METADATA = "ckptfs-protocol"
FIRST_VERSION = "1"
"""What a caller speaks that states no version."""
LOOPBACK = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D", "unix:")
UNKNOWN = "unknown"


class PeerAuthenticator:
    """Names the peer behind a call or a connection."""

    def __init__(self, cluster: str, identity: Identity | None, revoked: RevocationList) -> None:
        self._cluster = cluster
        self._revoked = revoked
        self._has_keys = identity is not None

    def authenticate_call(self, context: grpc.ServicerContext) -> str:
        """Return the name of the calling node. Raises Rejection if the caller is no node of the cluster."""
        if self._has_keys:
            found = context.auth_context().get("x509_pem_cert")
            return self._authenticate_certificate(bytes(found[0]) if found else b"")
        if not context.peer().startswith(LOOPBACK):
            raise Rejection(RejectReason.STRANGER, "without keys only this machine may ask")
        said = _get_metadata(context)
        return self._check_node(said.get(NODE_METADATA, "")[:64], said.get(CLUSTER_METADATA, ""))

    def _authenticate_certificate(self, certificate: bytes) -> str:
        """Return the node name in a certificate (PEM) that TLS has checked. Raises Rejection for others."""
        if not certificate:
            raise Rejection(RejectReason.STRANGER, "no certificate")
        if not is_current(certificate, self._revoked.get_counts()):
            raise Rejection(RejectReason.STRANGER, "these keys were revoked")
        return self._check_node(*get_subject(certificate))

    def _check_node(self, node: str, cluster: str) -> str:
        if not NAME_PATTERN.fullmatch(node) or cluster != self._cluster:
            raise Rejection(RejectReason.STRANGER, f"this is cluster {self._cluster}")
        return node


def require_version(context: grpc.ServicerContext) -> None:
    """Raise Rejection if a caller speaks another version of the protocol than this node."""
    version = _get_metadata(context).get(VERSION_METADATA, FIRST_VERSION)
    if version != str(PROTOCOL_VERSION):
        raise Rejection(RejectReason.VERSION, describe_versions(str(PROTOCOL_VERSION), version if version.isdecimal() else "unknown"))


def describe_versions(server: str, client: str) -> str:
    """Return the message that refuses another version."""
    return f"it speaks version {server} of the protocol between nodes, the caller version {client}; run one version of ckptfs on all nodes"


def _get_metadata(context: grpc.ServicerContext) -> dict[str, str]:
    return {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
