"""Owns whose offer is believed: nobody makes another node hold, and show, bytes that its file never had.

A content's id says which node made it, and that one is believed; so is its last writer, as the store says, and whoever offers what the
store says that it is. Anybody else is told to come again: the store may not have heard yet. An island believes its peers.
If we die here: nothing is kept.
"""

from ckptfs.catalog import identity, settling
from ckptfs.catalog.database import Database
from ckptfs.clique import holders
from ckptfs.clique.shelf import Offer
from ckptfs.clique.surroundings import Cluster
from ckptfs.errors import Busy, StoreRefused, StoreUnreachable


class OfferValidator:
    """Any thread."""

    def __init__(self, db: Database, cluster: Cluster) -> None:
        self._db = db
        self._cluster = cluster

    def validate(self, offer: Offer) -> None:
        """Raises Busy when nobody who may says that the content holds what is offered. An early offer changes nothing yet, and passes."""
        if offer.is_early or self._is_node(identity.get_origin_node(offer.content), offer.sender) or self._is_known(offer):
            return
        try:
            shared = holders.load(self._cluster.store, [offer.content])[offer.content]
        except (StoreUnreachable, StoreRefused):
            return
        remote_state = shared.state
        if self._is_node(shared.writer, offer.sender) or (
            remote_state is not None and (remote_state.generation, remote_state.digest) == (offer.generation, offer.digest)
        ):
            return
        if offer.digest is None or not shared.list_holders_of(offer.generation, offer.digest):
            raise Busy("the store does not say that this content holds what is offered")

    def _is_node(self, number: int | None, name: str) -> bool:
        node = None if number is None else self._cluster.view().by_number.get(number)
        return node is not None and node.name == name

    def _is_known(self, offer: Offer) -> bool:
        known = settling.get_content(self._db, offer.content)
        return known is not None and (known.inode, known.generation, known.digest) == (offer.inode, offer.generation, offer.digest)
