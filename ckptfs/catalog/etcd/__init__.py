"""The shared store in etcd, version 3.4 or later: all keys of a cluster lie below /ckptfs/CLUSTER/.

Owns the connections of this process to etcd. It keeps nothing between calls but which endpoint answered last.
If we die here: etcd has a transaction or has it not; leases run out.
"""

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import grpc

from ckptfs import limits
from ckptfs.catalog.etcd.endpoints import Endpoints
from ckptfs.catalog.etcd.watch import EtcdWatch
from ckptfs.catalog.etcd.wire import AnswerTooLarge, EtcdCodec
from ckptfs.catalog.store import WAIT_S, Compare, Get, Operation, Outcome
from ckptfs.errors import LeaseGone
from ckptfs.protocol import etcd_pb2 as pb


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """The member of etcd that answers this process."""

    address: str
    version: str
    size_bytes: int
    has_leader: bool


class EtcdStore:
    """A `ckptfs.catalog.store.Store`, which says what each call does. With `ca` it speaks TLS, with `cert` and `key` it shows who it is."""

    def __init__(
        self, addresses: Sequence[str], cluster: str, *, ca: Path | None = None, cert: Path | None = None, key: Path | None = None
    ) -> None:
        self._addresses, self._cluster, self._keys = tuple(addresses), cluster, (ca, cert, key)
        self._endpoints = Endpoints(addresses, _build_credentials(ca, cert, key))
        self._wire = EtcdCodec(cluster)

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
        request = self._wire.encode_transaction(compares, changes, otherwise)
        return self._endpoints.call("transaction", request, self._wire.decode_outcome, timeout_s)

    def grant(self, ttl_s: int, *, timeout_s: float = WAIT_S) -> int:
        return self._endpoints.call("grant", pb.LeaseGrantRequest(TTL=ttl_s), _get_lease_id, timeout_s).result()

    def keep_alive(self, lease: int, *, timeout_s: float = WAIT_S) -> float:
        return self._endpoints.call("keep_alive", pb.LeaseKeepAliveRequest(ID=lease), _get_ttl_s, timeout_s).result()

    def revoke(self, lease: int, *, timeout_s: float = WAIT_S) -> None:
        with contextlib.suppress(LeaseGone):
            self._endpoints.call("revoke", pb.LeaseRevokeRequest(ID=lease), bool, timeout_s).result()

    def watch(self, key: bytes, end: bytes | None, from_revision: int) -> EtcdWatch:
        return EtcdWatch(self._endpoints, self._wire, key, end, from_revision)

    def get_member_status(self, *, timeout_s: float = WAIT_S) -> MemberStatus:
        """Who answers."""
        return self._endpoints.call("status", pb.StatusRequest(), self._build_member_status, timeout_s).result()

    def members(self) -> "list[EtcdStore]":
        ca, cert, key = self._keys
        return [EtcdStore([address], self._cluster, ca=ca, cert=cert, key=key) for address in self._addresses]

    def rotate_member(self) -> None:
        self._endpoints.mark_failed(self._endpoints.get_current())

    def close(self) -> None:
        self._endpoints.close()

    def _build_member_status(self, status: pb.StatusResponse) -> MemberStatus:
        return MemberStatus(self._endpoints.get_current().address, status.version, status.dbSize, status.leader != 0)


class _PagedRead:
    """A read in parts where it does not fit one transaction or one answer: the first gives the revision that the others are read at."""

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
        if isinstance(failure, AnswerTooLarge) and page_gets > 1:
            self._page_gets_max = page_gets // 2
        elif failure:
            self.future.set_exception(failure)
            return
        else:
            self._append_page(part.result())
            self._gets_left = self._gets_left[page_gets:]
            if not self._gets_left:
                self.future.set_result(self._outcome)
                return
        self._request_page()

    def _append_page(self, part: Outcome) -> None:
        self._outcome = Outcome(True, self._outcome.revision or part.revision, self._outcome.results + part.results)


def _get_lease_id(granted: pb.LeaseGrantResponse) -> int:
    return granted.ID


def _get_ttl_s(kept: pb.LeaseKeepAliveResponse) -> float:
    return float(kept.TTL)


def _build_credentials(ca: Path | None, cert: Path | None, key: Path | None) -> grpc.ChannelCredentials | None:
    """What TLS needs; None without an authority: no TLS."""
    if ca is None:
        return None
    return grpc.ssl_channel_credentials(ca.read_bytes(), key.read_bytes() if key else None, cert.read_bytes() if cert else None)
