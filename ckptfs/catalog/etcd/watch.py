"""A watch on etcd that outlives connections: it goes on, at any endpoint, after the last revision that it told.

If we die here: whoever watched reads again what is there, and watches from that revision on.
"""

import threading
from typing import Any

import grpc

from ckptfs import limits
from ckptfs.catalog.etcd.endpoints import CALL_METADATA, Endpoints
from ckptfs.catalog.etcd.wire import EtcdCodec, build_error, is_transient
from ckptfs.catalog.store import Get, WatchEvents
from ckptfs.errors import Compacted, StoreRefused, StoreUnreachable
from ckptfs.protocol import etcd_pb2 as pb


class EtcdWatch:
    """One thread iterates; any thread may close."""

    def __init__(self, endpoints: Endpoints, wire: EtcdCodec, key: bytes, end: bytes | None, from_revision: int) -> None:
        self._endpoints, self._wire = endpoints, wire
        self._key, self._end = wire.encode_key(key), wire.encode_end(end)
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
        """The next message; None where the stream broke and the next round begins a new one."""
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
            # The channel was closed, or we were before the stream began.
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
        """The stream broke: another endpoint, in a moment."""
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
        events, self._fragments = self._wire.decode_events(self._fragments), []
        # A message of a watch that lags says the store's revision, which is not yet that of its events.
        revision = events[-1].revision if events else response.header.revision
        self._next_revision = max(self._next_revision, revision + 1)
        return WatchEvents(revision, events)

    def _handle_created(self, revision: int) -> None:
        """The watch stands, at a member that is at this revision."""
        self._next_revision = self._next_revision or revision + 1
        if revision + 1 < self._next_revision:
            # That member lags; or etcd lost its data, and what we wait for will be something else.
            # Without an operation etcd takes a transaction for one that may be old, and the member answers by itself.
            newest_request = self._wire.encode_transaction((), [Get(b"")], ())
            newest = self._endpoints.call("transaction", newest_request, self._wire.decode_outcome, limits.ETCD_WAIT_S).result().revision
            if newest + 1 < self._next_revision:
                raise Compacted(f"etcd is at revision {newest} and was at {self._next_revision - 1} before: it lost its data")

    def _handle_canceled(self, response: pb.WatchResponse) -> None:
        if response.compact_revision:
            raise Compacted(f"etcd keeps nothing before revision {response.compact_revision}, asked for {self._next_revision}")
        if "permission" in response.cancel_reason:
            raise StoreRefused(f"etcd refused a watch: {response.cancel_reason}")
        self._reconnect()
