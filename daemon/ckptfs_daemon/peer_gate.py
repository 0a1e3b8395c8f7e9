"""Who is calling: the node's name from its certificate, of our CA and our cluster. Without keys: what the caller says, on loopback only.

Every call passes here. If we die here: nothing is kept.
"""

import grpc

from ckptfs.clique.keys import NAME_PATTERN, Identity, get_subject, is_current
from ckptfs.clique.revoked import RevocationList
from ckptfs_daemon.peer_refusals import Rejection, RejectReason

NODE_METADATA = "ckptfs-node"
CLUSTER_METADATA = "ckptfs-cluster"
LOOPBACK = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D", "unix:")
UNKNOWN = "unknown"


class PeerAuthenticator:
    """Names the peer behind a call."""

    def __init__(self, cluster: str, identity: Identity | None, revoked: RevocationList) -> None:
        self._cluster = cluster
        self._revoked = revoked
        self._has_keys = identity is not None

    def authenticate(self, context: grpc.ServicerContext) -> str:
        """The calling node's name. Raises Refusal for strangers."""
        node, cluster = self._read_certificate(context) if self._has_keys else self._read_metadata(context)
        if not NAME_PATTERN.fullmatch(node) or cluster != self._cluster:
            raise Rejection(RejectReason.STRANGER, f"this is cluster {self._cluster}")
        return node

    def _read_certificate(self, context: grpc.ServicerContext) -> tuple[str, str]:
        found = context.auth_context().get("x509_pem_cert")
        if not found:
            raise Rejection(RejectReason.STRANGER, "no certificate")
        certificate = bytes(found[0])
        if not is_current(certificate, self._revoked.get_counts()):
            raise Rejection(RejectReason.STRANGER, "these keys were revoked")
        return get_subject(certificate)

    @staticmethod
    def _read_metadata(context: grpc.ServicerContext) -> tuple[str, str]:
        if not context.peer().startswith(LOOPBACK):
            raise Rejection(RejectReason.STRANGER, "without keys only this machine may ask")
        said = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
        return said.get(NODE_METADATA, "")[:64], said.get(CLUSTER_METADATA, "")


def server_credentials(identity: Identity) -> grpc.ServerCredentials:
    """TLS that demands a certificate of our CA."""
    return grpc.ssl_server_credentials([(identity.key, identity.certificate)], identity.ca, require_client_auth=True)


def channel_credentials(identity: Identity) -> grpc.ChannelCredentials:
    """TLS that shows our certificate and trusts our CA only."""
    return grpc.ssl_channel_credentials(identity.ca, identity.key, identity.certificate)
