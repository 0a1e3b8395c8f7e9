"""Calls to the endpoints of one etcd: each call goes to the endpoint that answered last, and on to the next when that one fails.

One channel per endpoint. An endpoint that does not answer costs the calls that find it so ETCD_TRY_S, and later ones nothing.
If we die here: calls under way may or may not have been done.
"""

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import grpc

from ckptfs import limits
from ckptfs.catalog.etcd.wire import build_error, is_transient
from ckptfs.protocol import etcd_pb2_grpc as rpc

Answer = TypeVar("Answer")
# A member that was cut off from the others says so at once instead of waiting for them.
CALL_METADATA = (("hasleader", "true"),)
CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", limits.ETCD_ANSWER_BYTES_MAX),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", int(limits.ETCD_TRY_S * 1000)),
    ("grpc.max_reconnect_backoff_ms", int(limits.ETCD_TRY_S * 500)),
    ("grpc.keepalive_time_ms", int(limits.ETCD_PROBE_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(limits.ETCD_PROBE_WAIT_S * 1000)),
    # The same bound in grpc since 1.62, where a server whose kernel still acknowledges bytes counts as alive for the other one.
    ("grpc.http2.ping_timeout_ms", int(limits.ETCD_PROBE_WAIT_S * 1000)),
    ("grpc.http2.max_pings_without_data", 0),
)


class Endpoint:
    """One member of etcd and its calls."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None) -> None:
        self.address = address
        options = list(CHANNEL_OPTIONS)
        self._channel = (
            grpc.secure_channel(address, credentials, options=options) if credentials else grpc.insecure_channel(address, options=options)
        )
        lease = rpc.LeaseStub(self._channel)
        self.watch: Any = rpc.WatchStub(self._channel).Watch
        self.calls: dict[str, Any] = {
            "transaction": rpc.KVStub(self._channel).Txn,
            "grant": lease.LeaseGrant,
            "keep_alive": lease.LeaseKeepAlive,
            "revoke": lease.LeaseRevoke,
            "status": rpc.MaintenanceStub(self._channel).Status,
        }
        self._idle_stream: Any = None

    def start_call(self, call: str, request: object, timeout_s: float, wait_for_ready: bool) -> "grpc.Future[Any]":
        """Send a request; `patient`: wait for a connection where there is none."""
        self._keep_idle_stream()
        pending: grpc.Future[Any] = self.calls[call].future(
            request, timeout=timeout_s, metadata=CALL_METADATA, wait_for_ready=wait_for_ready
        )
        return pending

    def _keep_idle_stream(self) -> None:
        """Keep a stream that watches nothing.

        While a channel has a stream, grpc probes the connection and keeps the thread that takes answers; without, it starts
        a thread for every single call (measured: a read takes 0.34 ms with the stream, 0.60 ms and twice the CPU without).
        """
        if self._idle_stream is None or self._idle_stream.done():
            self._idle_stream = self.watch(iter(()), metadata=CALL_METADATA)

    def close(self) -> None:
        self._channel.close()


class Endpoints:
    """All members, and which of them answered last."""

    def __init__(self, addresses: Sequence[str], credentials: grpc.ChannelCredentials | None) -> None:
        self._all = [Endpoint(address, credentials) for address in addresses]
        # Nodes begin with different members.
        self._current = random.randrange(len(self._all))
        self._lock = threading.Lock()
        self._delayed_calls = DelayedCalls()
        self.closed = threading.Event()

    def __len__(self) -> int:
        return len(self._all)

    def get_current(self) -> Endpoint:
        return self._all[self._current]

    def mark_failed(self, endpoint: Endpoint) -> None:
        """It failed: go on to the next, unless another call has done so already."""
        with self._lock:
            if self._all[self._current] is endpoint:
                self._current = (self._current + 1) % len(self._all)

    def call(self, call: str, request: object, decode: Callable[[Any], Answer], timeout_s: float) -> "Future[Answer]":
        """Make a call; the future has what `finish` makes of the answer."""
        made = EndpointCall(self, call, request, decode, timeout_s)
        made.start_next_try()
        return made.future

    def call_later(self, act: Callable[[], None]) -> None:
        """Do it after ETCD_PAUSE_S, or when everything ends."""
        self._delayed_calls.call_later(act)

    def close(self) -> None:
        self.closed.set()
        self._delayed_calls.close()
        for endpoint in self._all:
            endpoint.close()


class EndpointCall(Generic[Answer]):
    """One call until it is answered, refused or out of time."""

    def __init__(self, endpoints: Endpoints, call: str, request: object, finish: Callable[[Any], Answer], timeout_s: float) -> None:
        self.future: Future[Answer] = Future()
        self.future.set_running_or_notify_cancel()
        self._endpoints, self._call, self._request, self._decode = endpoints, call, request, finish
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._was_suspended = False
        self._tries = 0
        self._failure = build_error(None, "no time to ask", endpoints.get_current().address)

    def start_next_try(self) -> None:
        """Ask the endpoint that is current now."""
        left_s = self._deadline_s - time.monotonic()
        if left_s < -limits.ETCD_LATE_S and not self._was_suspended:
            # Nothing ran here for a while, so nobody could have answered: what is known here may be old, and etcd need not be away.
            self._was_suspended, left_s = True, self._timeout_s
            self._deadline_s = time.monotonic() + left_s
        if left_s <= 0 or self._endpoints.closed.is_set():
            self.future.set_exception(self._failure)
            return
        self._endpoint = self._endpoints.get_current()
        count = len(self._endpoints)
        # The first round finds an endpoint that answers quickly; after it every one may take its time.
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
            self.future.set_result(self._decode(pending.result()))
            return
        # That the time was over says less than why an earlier try failed.
        if code is not grpc.StatusCode.DEADLINE_EXCEEDED or not self._tries:
            self._failure = build_error(code, details, self._endpoint.address)
        if not is_transient(code, details):
            self.future.set_exception(self._failure)
            return
        self._endpoints.mark_failed(self._endpoint)
        self._tries += 1
        if self._tries % len(self._endpoints):
            self.start_next_try()
        else:
            self._endpoints.call_later(self.start_next_try)


class DelayedCalls:
    """Acts that wait ETCD_PAUSE_S, one after the other, on a thread that exists only while some do."""

    def __init__(self) -> None:
        self._queue: deque[tuple[float, Callable[[], None]]] = deque()
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def call_later(self, act: Callable[[], None]) -> None:
        with self._lock:
            self._queue.append((time.monotonic() + limits.ETCD_PAUSE_S, act))
            if len(self._queue) == 1:
                threading.Thread(target=self._run, name="etcd-pauses", daemon=True).start()

    def close(self) -> None:
        """Nobody waits any more."""
        self._closed.set()

    def _run(self) -> None:
        more = True
        while more:
            due_s, act = self._queue[0]
            self._closed.wait(max(0.0, due_s - time.monotonic()))
            act()
            with self._lock:
                self._queue.popleft()
                more = bool(self._queue)
