"""Opens the store that the nodes of this mount's cluster share, and makes this node one of them at its start.

If we die here: the store binds a number to this catalog before the catalog knows it, so the next start gets the same one.
"""

import logging

from ckptfs.catalog import belonging, identity
from ckptfs.catalog.database import Database
from ckptfs.catalog.etcd import EtcdStore
from ckptfs.catalog.same_store import EpochCheckedStore
from ckptfs.clique.joining import register
from ckptfs.config import Config
from ckptfs.errors import InvalidArgument, StoreUnreachable

log = logging.getLogger(__name__)


def open_store(config: Config) -> EtcdStore:
    """The store of the cluster that `config` names. Connects when it is asked something."""
    assert config.cluster is not None
    return EtcdStore(config.etcd, config.cluster, ca=config.etcd_ca, cert=config.etcd_cert, key=config.etcd_key)


def ensure_registered(config: Config, db: Database) -> None:
    """See that this node has its number. Raises Refused: another daemon has its name, or it has none yet and etcd does not answer."""
    assert config.cluster is not None
    known = identity.get_node_number(db)
    store = EpochCheckedStore(open_store(config), db)
    try:
        number = register(store, config.node, belonging.get_catalog_id(db), known)
    except StoreUnreachable as failure:
        if not known:
            raise InvalidArgument(
                f"node {config.node} has never been in the cluster {config.cluster}, and needs its etcd to join: {failure}",
                remedy=f"see that etcd runs and can be reached at {' or '.join(config.etcd)}; later starts do without it",
            ) from failure
        log.warning("%s; this node starts with what it knows, and tells the cluster later", failure)
        return
    finally:
        store.close()
    with db.transaction():
        belonging.set_cluster(db, config.cluster)
        identity.set_node_number(db, number)
