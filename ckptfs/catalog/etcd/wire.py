"""The store's values as etcd's messages and back, with the cluster's prefix before every key; and what etcd's errors mean.

Pure. If we die here: nothing.
"""

from collections.abc import Iterable, Sequence

import grpc

from ckptfs.catalog.store import ENDLESS, Compare, CompareTarget, Delete, Event, Get, Item, Operation, Outcome, Put, prefix_end
from ckptfs.errors import CkptfsError, Compacted, LeaseGone, StoreRefused, StoreUnreachable
from ckptfs.protocol import etcd_pb2 as pb

_RELATIONS = {
    "=": pb.Compare.CompareResult.EQUAL,
    "!=": pb.Compare.CompareResult.NOT_EQUAL,
    "<": pb.Compare.CompareResult.LESS,
    ">": pb.Compare.CompareResult.GREATER,
}
_TARGETS = {
    CompareTarget.VERSION: "version",
    CompareTarget.CREATE: "create_revision",
    CompareTarget.MOD: "mod_revision",
    CompareTarget.VALUE: "value",
}
# The connection broke, the member stops or has no leader, or was too slow: another try may be answered.
_TRANSIENT_CODES = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.ABORTED,
}


class AnswerTooLarge(StoreRefused):
    """What was asked for does not fit one answer."""


class EtcdCodec:
    """Translates for one cluster."""

    def __init__(self, cluster: str) -> None:
        self._prefix = f"/ckptfs/{cluster}/".encode()

    def encode_key(self, key: bytes) -> bytes:
        return self._prefix + key

    def encode_end(self, end: bytes | None) -> bytes:
        """The end of a range; without one etcd means a single key."""
        if end is None:
            return b""
        return prefix_end(self._prefix) if end == ENDLESS else self._prefix + end

    def encode_transaction(self, compares: Iterable[Compare], changes: Iterable[Operation], otherwise: Iterable[Get]) -> pb.TxnRequest:
        return pb.TxnRequest(
            compare=[self._encode_compare(compare) for compare in compares],
            success=[self._encode_operation(change) for change in changes],
            failure=[self._encode_operation(get) for get in otherwise],
        )

    def decode_outcome(self, response: pb.TxnResponse) -> Outcome:
        found = (answer.response_range.kvs for answer in response.responses if answer.HasField("response_range"))
        return Outcome(response.succeeded, response.header.revision, tuple(tuple(map(self._decode_item, items)) for items in found))

    def decode_events(self, events: Sequence[pb.Event]) -> tuple[Event, ...]:
        return tuple(self._decode_event(event) for event in events)

    def _decode_item(self, item: pb.KeyValue) -> Item:
        return Item(item.key[len(self._prefix) :], item.value, item.mod_revision, item.create_revision)

    def _decode_event(self, event: pb.Event) -> Event:
        item = self._decode_item(event.kv)
        return Event(item.key, item.mod_revision, item if event.type == pb.Event.EventType.PUT else None)

    def _encode_compare(self, compare: Compare) -> pb.Compare:
        made = pb.Compare(
            result=_RELATIONS[compare.relation],
            target=compare.target.name,
            key=self.encode_key(compare.key),
            range_end=self.encode_end(compare.end),
        )
        setattr(made, _TARGETS[compare.target], compare.value)
        return made

    def _encode_operation(self, operation: Operation) -> pb.RequestOp:
        key = self.encode_key(operation.key)
        match operation:
            case Get():
                return pb.RequestOp(
                    request_range=pb.RangeRequest(
                        key=key,
                        range_end=self.encode_end(operation.end),
                        limit=operation.limit,
                        revision=operation.revision,
                        keys_only=operation.keys_only,
                    )
                )
            case Put():
                return pb.RequestOp(request_put=pb.PutRequest(key=key, value=operation.value, lease=operation.lease))
            case Delete():
                return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key, range_end=self.encode_end(operation.end)))


def is_transient(code: grpc.StatusCode | None, details: str) -> bool:
    """Whether the same call may be answered at another endpoint, or in a moment."""
    return code is None or code in _TRANSIENT_CODES or "too many requests" in details


def build_error(code: grpc.StatusCode | None, details: str, address: str) -> CkptfsError:
    """What a call that was not answered raises."""
    # An etcd that is full or broken is as good as none: nodes go on without it.
    if is_transient(code, details) or "space exceeded" in details or code is grpc.StatusCode.DATA_LOSS:
        return StoreUnreachable(f"etcd at {address} does not answer: {details or code}", remedy="see whether etcd runs and has a leader")
    if "compacted" in details:
        return Compacted(f"etcd at {address}: {details}")
    if "lease not found" in details:
        return LeaseGone(f"etcd at {address}: {details}")
    if "Received message larger" in details:
        return AnswerTooLarge(f"etcd at {address}: {details}")
    return StoreRefused(f"etcd at {address} refused: {details or code}")
