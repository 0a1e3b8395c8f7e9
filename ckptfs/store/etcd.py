"""The shared store in etcd, version 3.4 or later. All keys of a cluster are below /ckptfs/CLUSTER/.

Each call goes to the endpoint that answered last. If it fails, the call goes on to the next one: an endpoint that does not answer costs
the first calls ETCD_TRY_S and later ones nothing. A watch survives broken connections: it continues, at any endpoint, after the last
revision that it delivered. `EtcdCodec` translates keys, values and messages; it is pure.

Crash safety: etcd has applied a transaction or not; leases expire.
"""

import contextlib
import functools
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc

from ckptfs import limits
from ckptfs.config import Config
from ckptfs.errors import (
    CkptfsError,
    Compacted,
    LeaseGone,
    StoreFull,
    StoreRefused,
    StoreUnreachable,
    TooManyOperations,
    TransactionInvalid,
    describe_connection_fault,
)
from ckptfs.protocol import etcd_pb2 as pb
from ckptfs.protocol import etcd_pb2_grpc as rpc
from ckptfs.store.kv import ENDLESS, WAIT_S, Compare, Delete, Event, Get, Item, Operation, Outcome, Put, WatchEvents, prefix_end

Answer = TypeVar("Answer")

_RELATIONS = {
    "=": pb.Compare.CompareResult.EQUAL,
    "!=": pb.Compare.CompareResult.NOT_EQUAL,
    "<": pb.Compare.CompareResult.LESS,
    ">": pb.Compare.CompareResult.GREATER,
}

# The connection broke, or the member is stopping, has no leader or is too slow: another try may succeed.
_TRANSIENT_CODES = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.ABORTED,
}

# A member without a leader fails the call at once instead of waiting for one.
CALL_METADATA = (("hasleader", "true"),)

CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", limits.ETCD_RESPONSE_BYTES_MAX),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", int(limits.ETCD_TRY_S * 1000)),
    ("grpc.max_reconnect_backoff_ms", int(limits.ETCD_TRY_S * 500)),
    ("grpc.keepalive_time_ms", int(limits.ETCD_PROBE_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(limits.ETCD_PROBE_WAIT_S * 1000)),
    # Since grpc 1.62 this one is needed as well: a server whose kernel still acknowledges bytes counts as alive for the other.
    ("grpc.http2.ping_timeout_ms", int(limits.ETCD_PROBE_WAIT_S * 1000)),
    ("grpc.http2.max_pings_without_data", 0),
)


def open_store(config: Config) -> "EtcdStore":
    """Return the store of the cluster of `config`. It connects at the first call."""
    assert config.cluster is not None
    return EtcdStore(config.etcd, config.cluster, ca=config.etcd_ca, cert=config.etcd_cert, key=config.etcd_key)


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """The member of etcd that answers this process."""

    address: str
    size_bytes: int
    quota_bytes: int  # 0 if this version of etcd does not report it.


class EtcdStore:
    """A `ckptfs.store.kv.Store`. `ca` enables TLS; `cert` and `key` authenticate this client."""

    def __init__(
        self, addresses: Sequence[str], cluster: str, *, ca: Path | None = None, cert: Path | None = None, key: Path | None = None
    ) -> None:
        self._addresses, self._cluster, self._keys = tuple(addresses), cluster, (ca, cert, key)
        self._endpoints = Endpoints(addresses, _build_credentials(ca, cert, key))
        self._codec = EtcdCodec(cluster)

    def read(self, gets: Sequence[Get], *, timeout_s: float = WAIT_S) -> Outcome:
        return self.read_soon(gets, timeout_s=timeout_s).result()

    def commit(
        self, compares: Sequence[Compare], changes: Sequence[Operation], otherwise: Sequence[Get] = (), *, timeout_s: float = WAIT_S
    ) -> Outcome:
        return self.commit_soon(compares, changes, otherwise, timeout_s=timeout_s).result()

    def read_soon(self, gets: Sequence[Get], *, timeout_s: float = WAIT_S) -> Future[Outcome]:
        return _PagedRead(self, gets, timeout_s).future

    def commit_soon(
        self, compares: Sequence[Compare], changes: Sequence[Operation], otherwise: Sequence[Get] = (), *, timeout_s: float = WAIT_S
    ) -> Future[Outcome]:
        request = self._codec.encode_transaction(compares, changes, otherwise)
        return self._endpoints.call("transaction", request, functools.partial(self._codec.decode_outcome, request), timeout_s)

    def grant(self, ttl_s: int, *, timeout_s: float = WAIT_S) -> int:
        return self._endpoints.call("grant", pb.LeaseGrantRequest(TTL=ttl_s), lambda granted: int(granted.ID), timeout_s).result()

    def keep_alive(self, lease: int, *, timeout_s: float = WAIT_S) -> float:
        return self._endpoints.call("keep_alive", pb.LeaseKeepAliveRequest(ID=lease), lambda kept: float(kept.TTL), timeout_s).result()

    def revoke(self, lease: int, *, timeout_s: float = WAIT_S) -> None:
        with contextlib.suppress(LeaseGone):
            self._endpoints.call("revoke", pb.LeaseRevokeRequest(ID=lease), bool, timeout_s).result()

    def watch(self, key: bytes, end: bytes | None, from_revision: int) -> "EtcdWatch":
        return EtcdWatch(self._endpoints, self._codec, key, end, from_revision)

    def get_member_status(self, *, timeout_s: float = WAIT_S) -> MemberStatus:
        status = self._endpoints.call("status", pb.StatusRequest(), lambda found: found, timeout_s).result()
        return MemberStatus(self._endpoints.get_current().address, status.dbSize, status.dbSizeQuota)

    def list_alarms(self, *, timeout_s: float = WAIT_S) -> list[str]:
        """Return the alarms of all members: NOSPACE, CORRUPT."""
        reply = self._endpoints.call("alarm", pb.AlarmRequest(), lambda found: found, timeout_s).result()
        return sorted({pb.AlarmType.Name(one.alarm) for one in reply.alarms})

    def members(self) -> "list[EtcdStore]":
        ca, cert, key = self._keys
        return [EtcdStore([address], self._cluster, ca=ca, cert=cert, key=key) for address in self._addresses]

    def rotate_member(self) -> None:
        self._endpoints.mark_failed(self._endpoints.get_current())

    def close(self) -> None:
        self._endpoints.close()


class _PagedRead:
    """A read in pages at one revision, if it does not fit one transaction or response."""

    def __init__(self, store: EtcdStore, gets: Sequence[Get], timeout_s: float) -> None:
        self.future: Future[Outcome] = Future()
        self.future.set_running_or_notify_cancel()
        self._store, self._gets_left, self._deadline_s = store, gets, time.monotonic() + timeout_s
        self._page_gets_max = limits.ETCD_TRANSACTION_MAX
        self._outcome = Outcome(True, 0, ())
        self._request_page()

    def _request_page(self) -> None:
        gets = self._gets_left[: self._page_gets_max]
        if self._outcome.revision:
            gets = [replace(get, revision=get.revision or self._outcome.revision) for get in gets]
        self._store.commit_soon((), gets, timeout_s=self._deadline_s - time.monotonic()).add_done_callback(self._handle_page)

    def _handle_page(self, part: Future[Outcome]) -> None:
        failure = part.exception()
        page_gets = min(self._page_gets_max, len(self._gets_left))
        if isinstance(failure, AnswerTooLarge | TooManyOperations) and page_gets > 1:
            self._page_gets_max = page_gets // 2
        elif failure:
            self.future.set_exception(failure)
            return
        else:
            page = part.result()
            self._outcome = Outcome(True, self._outcome.revision or page.revision, self._outcome.results + page.results)
            self._gets_left = self._gets_left[page_gets:]
            if not self._gets_left:
                self.future.set_result(self._outcome)
                return
        self._request_page()


def _build_credentials(ca: Path | None, cert: Path | None, key: Path | None) -> grpc.ChannelCredentials | None:
    if ca is None:
        return None
    return grpc.ssl_channel_credentials(ca.read_bytes(), key.read_bytes() if key else None, cert.read_bytes() if cert else None)


class EtcdWatch:
    """A `Watch`. One thread iterates; any thread may close."""

    def __init__(self, endpoints: "Endpoints", codec: "EtcdCodec", key: bytes, end: bytes | None, from_revision: int) -> None:
        self._endpoints, self._codec = endpoints, codec
        self._key, self._end = codec.encode_key(key), codec.encode_end(end)
        self._next_revision = from_revision
        self._fragments: list[pb.Event] = []
        self._endpoint = endpoints.get_current()
        self._stream: Any = None
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def __iter__(self) -> "EtcdWatch":
        return self

    def __next__(self) -> WatchEvents:
        while not self._closed.is_set() and not self._endpoints.closed.is_set():
            response = self._next_response()
            try:
                events = self._handle_response(response) if response is not None else None
            except StoreUnreachable:
                self._reconnect()
                continue
            if events is not None:
                return events
        raise StopIteration

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            if self._stream is not None:
                self._stream.cancel()

    def _next_response(self) -> pb.WatchResponse | None:
        """Return the next message; None if the stream broke and must be reopened."""
        try:
            if self._stream is None:
                self._open_stream()
            response: pb.WatchResponse | None = next(self._stream, None)
            if response is not None:
                return response
        except grpc.RpcError as failure:
            code, details = failure.code(), failure.details() or ""
            if not is_transient(code, details):
                raise build_error(code, details, self._endpoint.address) from failure
        except ValueError:
            # The channel or this watch is closed.
            return None
        self._reconnect()
        return None

    def _open_stream(self) -> None:
        self._endpoint = self._endpoints.get_current()
        create = pb.WatchCreateRequest(
            key=self._key, range_end=self._end, start_revision=self._next_revision, progress_notify=True, fragment=True
        )
        with self._lock:
            if self._closed.is_set():
                raise ValueError("closed")
            self._stream = self._endpoint.watch(iter((pb.WatchRequest(create_request=create),)), metadata=CALL_METADATA)

    def _reconnect(self) -> None:
        if not self._closed.is_set():
            self._endpoints.mark_failed(self._endpoint)
            self._closed.wait(limits.ETCD_PAUSE_S)
        self._stream, self._fragments = None, []

    def _handle_response(self, response: pb.WatchResponse) -> WatchEvents | None:
        if response.canceled:
            self._handle_canceled(response)
            return None
        if response.created:
            self._handle_created(response.header.revision)
            return None
        self._fragments.extend(response.events)
        if response.fragment:
            return None
        events, self._fragments = tuple(map(self._codec.decode_event, self._fragments)), []
        # The header of a lagging watch has the revision of the store, which is newer than its events.
        revision = events[-1].revision if events else response.header.revision
        self._next_revision = max(self._next_revision, revision + 1)
        return WatchEvents(revision, events)

    def _handle_created(self, revision: int) -> None:
        self._next_revision = self._next_revision or revision + 1
        if revision + 1 < self._next_revision:
            # Either this member lags, or etcd lost its data. The Get makes the read linearizable: a transaction without operations is
            # answered by the member alone.
            newest_request = self._codec.encode_transaction((), [Get(b"")], ())
            decode = functools.partial(self._codec.decode_outcome, newest_request)
            newest = self._endpoints.call("transaction", newest_request, decode, limits.ETCD_WAIT_S).result().revision
            if newest + 1 < self._next_revision:
                raise Compacted(f"etcd is at revision {newest} but was at {self._next_revision - 1}: it lost its data")

    def _handle_canceled(self, response: pb.WatchResponse) -> None:
        if response.compact_revision:
            raise Compacted(f"etcd was compacted at revision {response.compact_revision}; {self._next_revision} was requested")
        if "permission" in response.cancel_reason:
            raise StoreRefused(f"etcd refused a watch: {response.cancel_reason}")
        self._reconnect()


class Endpoint:
    """One member of etcd."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None) -> None:
        self.address = address
        options = list(CHANNEL_OPTIONS)
        self._channel = (
            grpc.secure_channel(address, credentials, options=options) if credentials else grpc.insecure_channel(address, options=options)
        )
        lease, maintenance = rpc.LeaseStub(self._channel), rpc.MaintenanceStub(self._channel)
        self.watch: Any = rpc.WatchStub(self._channel).Watch
        self.calls: dict[str, Any] = {
            "transaction": rpc.KVStub(self._channel).Txn,
            "grant": lease.LeaseGrant,
            "keep_alive": lease.LeaseKeepAlive,
            "revoke": lease.LeaseRevoke,
            "status": maintenance.Status,
            "alarm": maintenance.Alarm,
        }
        self._idle_stream: Any = None

    def start_call(self, call: str, request: object, timeout_s: float, wait_for_ready: bool) -> "grpc.Future[Any]":
        """Send a request. With `wait_for_ready`, wait for a connection first."""
        self._keep_idle_stream()
        pending: grpc.Future[Any] = self.calls[call].future(
            request, timeout=timeout_s, metadata=CALL_METADATA, wait_for_ready=wait_for_ready
        )
        return pending

    def _keep_idle_stream(self) -> None:
        """Keep a stream open that watches nothing.

        While a channel has a stream, grpc probes the connection and keeps the thread that receives responses. Without one it starts
        a thread for every call (measured: a read takes 0.34 ms with the stream, 0.60 ms and twice the CPU without).
        """
        if self._idle_stream is None or self._idle_stream.done():
            self._idle_stream = self.watch(iter(()), metadata=CALL_METADATA)

    def close(self) -> None:
        self._channel.close()


class Endpoints:
    """All members, and the one that answered last."""

    def __init__(self, addresses: Sequence[str], credentials: grpc.ChannelCredentials | None) -> None:
        self._all = [Endpoint(address, credentials) for address in addresses]
        # Nodes start with different members.
        self._current = random.randrange(len(self._all))
        self._lock = threading.Lock()
        self.closed = threading.Event()

    def __len__(self) -> int:
        return len(self._all)

    def get_current(self) -> Endpoint:
        return self._all[self._current]

    def mark_failed(self, endpoint: Endpoint) -> None:
        """Continue with the next member, unless another call has already done so."""
        with self._lock:
            if self._all[self._current] is endpoint:
                self._current = (self._current + 1) % len(self._all)

    def call(self, call: str, request: object, decode: Callable[[Any], Answer], timeout_s: float) -> "Future[Answer]":
        """Start a call; its future has the decoded response."""
        message = EndpointCall(self, call, request, decode, timeout_s)
        message.start_next_try()
        return message.future

    def call_later(self, act: Callable[[], None], pause_s: float) -> None:
        """Run `act` after `pause_s`, or at close, in a thread of its own."""

        def wait() -> None:
            self.closed.wait(pause_s)
            act()

        threading.Thread(target=wait, name="etcd pause", daemon=True).start()

    def close(self) -> None:
        self.closed.set()
        for endpoint in self._all:
            endpoint.close()


class EndpointCall(Generic[Answer]):
    """One call until it is answered, refused or timed out."""

    def __init__(self, endpoints: Endpoints, call: str, request: object, decode: Callable[[Any], Answer], timeout_s: float) -> None:
        self.future: Future[Answer] = Future()
        self.future.set_running_or_notify_cancel()
        self._endpoints, self._call, self._request, self._decode = endpoints, call, request, decode
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._was_suspended = False
        self._tries = 0
        self._failure: CkptfsError | None = None

    def start_next_try(self) -> None:
        left_s = self._deadline_s - time.monotonic()
        if left_s < -limits.ETCD_LATE_S and not self._was_suspended:
            # This process was suspended, so it could not receive a response: etcd may be fine.
            self._was_suspended, left_s = True, self._timeout_s
            self._deadline_s = time.monotonic() + left_s
        if left_s <= 0 or self._endpoints.closed.is_set():
            early = "the time was up before the call"
            self.future.set_exception(self._failure or build_error(None, early, self._endpoints.get_current().address))
            return
        self._endpoint = self._endpoints.get_current()
        count = len(self._endpoints)
        # The first round looks for an endpoint that answers quickly; later tries use all the time that is left.
        try_s = min(left_s, limits.ETCD_TRY_S) if self._tries < count > 1 else left_s
        try:
            pending = self._endpoint.start_call(self._call, self._request, try_s, wait_for_ready=count == 1 and self._tries > 0)
        except ValueError as closed:
            self.future.set_exception(build_error(None, str(closed), self._endpoint.address))
            return
        pending.add_done_callback(self._handle_answer)

    def _handle_answer(self, pending: Any) -> None:
        code, details = pending.code(), pending.details() or ""
        if code is grpc.StatusCode.OK:
            try:
                answer = self._decode(pending.result())
            except CkptfsError as failure:
                self.future.set_exception(failure)
                return
            self.future.set_result(replace(answer, is_repeated=True) if self._tries and isinstance(answer, Outcome) else answer)
            return
        # The error of an earlier try says more than a later timeout.
        if code is not grpc.StatusCode.DEADLINE_EXCEEDED or not self._tries:
            self._failure = build_error(code, details, self._endpoint.address)
        if not is_transient(code, details):
            self.future.set_exception(self._failure)
            return
        self._tries += 1
        is_overloaded = "too many requests" in details
        if not is_overloaded:  # All members share the load.
            self._endpoints.mark_failed(self._endpoint)
            if self._tries % len(self._endpoints):
                self.start_next_try()
                return
        pause_s = min(limits.ETCD_PAUSE_S * 2 ** min(self._tries, 10), limits.ETCD_PAUSE_S_MAX) if is_overloaded else limits.ETCD_PAUSE_S
        self._endpoints.call_later(self.start_next_try, pause_s * random.uniform(0.5, 1.5))


class AnswerTooLarge(StoreRefused):
    """The response exceeds the message limit."""


_REFUSALS: dict[str, type[CkptfsError]] = {
    "compacted": Compacted, "lease not found": LeaseGone, "Received message larger": AnswerTooLarge,
    # No member will ever apply such a transaction.
    **dict.fromkeys(("request is too large", "duplicate key", "message larger than max"), TransactionInvalid),
}  # fmt: skip
"""The errors by what etcd and gRPC say."""


class EtcdCodec:
    """Translation between the store's values and etcd's messages, for one cluster."""

    def __init__(self, cluster: str) -> None:
        self._prefix = f"/ckptfs/{cluster}/".encode()

    def encode_key(self, key: bytes) -> bytes:
        return self._prefix + key

    def encode_end(self, end: bytes | None) -> bytes:
        """Return the end of a range; for etcd an empty one means a single key."""
        if end is None:
            return b""
        return prefix_end(self._prefix) if end == ENDLESS else self._prefix + end

    def encode_transaction(self, compares: Iterable[Compare], changes: Iterable[Operation], otherwise: Iterable[Get]) -> pb.TxnRequest:
        return pb.TxnRequest(
            compare=[self._encode_compare(compare) for compare in compares],
            success=[self._encode_operation(change) for change in changes],
            failure=[self._encode_operation(get) for get in otherwise],
        )

    def decode_outcome(self, request: pb.TxnRequest, response: pb.TxnResponse) -> Outcome:
        """Return the result of a transaction. Raises StoreUnreachable unless it has what was asked for."""
        asked = sum(one.HasField("request_range") for one in (request.success if response.succeeded else request.failure))
        found = [answer.response_range.kvs for answer in response.responses if answer.HasField("response_range")]
        if len(found) != asked:
            raise StoreUnreachable(f"etcd answers {len(found)} of {asked} questions", remedy="see what answers at the address of etcd")
        return Outcome(response.succeeded, response.header.revision, tuple(tuple(map(self._decode_item, items)) for items in found))

    def _decode_item(self, item: pb.KeyValue) -> Item:
        return Item(item.key[len(self._prefix) :], item.value, item.mod_revision, item.create_revision)

    def decode_event(self, event: pb.Event) -> Event:
        item = self._decode_item(event.kv)
        return Event(item.key, item.mod_revision, item if event.type == pb.Event.EventType.PUT else None)

    def _encode_compare(self, compare: Compare) -> pb.Compare:
        message = pb.Compare(
            result=_RELATIONS[compare.relation],
            target=compare.target.name,
            key=self.encode_key(compare.key),
            range_end=self.encode_end(compare.end),
        )
        setattr(message, compare.target, compare.value)
        return message

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
    """Return True if the same call may succeed at another endpoint or a moment later."""
    return code is None or code in _TRANSIENT_CODES or "too many requests" in details


def build_error(code: grpc.StatusCode | None, details: str, address: str) -> CkptfsError:
    """Return the error of a failed call."""
    # Nodes continue without an etcd that is full or broken, as without one that does not answer.
    if "space exceeded" in details:
        return StoreFull(f"etcd at {address}")
    if is_transient(code, details) or code is grpc.StatusCode.DATA_LOSS:
        return StoreUnreachable(
            f"etcd at {address} does not answer: {describe_connection_fault(details)}", remedy="check that etcd runs and has a leader"
        )
    if "too many operations" in details:
        return TooManyOperations(f"etcd at {address}")
    refusal = next((kind for words, kind in _REFUSALS.items() if words in details), None)
    return StoreRefused(f"etcd at {address} refused: {details or code}") if refusal is None else refusal(f"etcd at {address}: {details}")
