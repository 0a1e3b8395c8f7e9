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
from ckptfs.catalog.etcd.wire import AnswerTooLarge, Wire
from ckptfs.catalog.store import WAIT_S, Compare, Get, Operation, Outcome
from ckptfs.errors import LeaseGone
from ckptfs.protocol import etcd_pb2 as pb


@dataclass(frozen=True, slots=True)
class About:
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
        self._endpoints = Endpoints(addresses, _credentials(ca, cert, key))
        self._wire = Wire(cluster)

    def read(self, gets: Sequence[Get], *, timeout_s: float = WAIT_S) -> Outcome:
        return self.read_soon(gets, timeout_s=timeout_s).result()

    def commit(
        self, compares: Sequence[Compare], changes: Sequence[Operation], otherwise: Sequence[Get] = (), *, timeout_s: float = WAIT_S
    ) -> Outcome:
        return self.commit_soon(compares, changes, otherwise, timeout_s=timeout_s).result()

    def read_soon(self, gets: Sequence[Get], *, timeout_s: float = WAIT_S) -> Future[Outcome]:
        return _Read(self, gets, timeout_s).future

    def commit_soon(
        self, compares: Sequence[Compare], changes: Sequence[Operation], otherwise: Sequence[Get] = (), *, timeout_s: float = WAIT_S
    ) -> Future[Outcome]:
        request = self._wire.transaction(compares, changes, otherwise)
        return self._endpoints.call("transaction", request, self._wire.outcome, timeout_s)

    def grant(self, ttl_s: int, *, timeout_s: float = WAIT_S) -> int:
        return self._endpoints.call("grant", pb.LeaseGrantRequest(TTL=ttl_s), _lease, timeout_s).result()

    def keep_alive(self, lease: int, *, timeout_s: float = WAIT_S) -> float:
        return self._endpoints.call("keep_alive", pb.LeaseKeepAliveRequest(ID=lease), _ttl_s, timeout_s).result()

    def revoke(self, lease: int, *, timeout_s: float = WAIT_S) -> None:
        with contextlib.suppress(LeaseGone):
            self._endpoints.call("revoke", pb.LeaseRevokeRequest(ID=lease), bool, timeout_s).result()

    def watch(self, key: bytes, end: bytes | None, from_revision: int) -> EtcdWatch:
        return EtcdWatch(self._endpoints, self._wire, key, end, from_revision)

    def about(self, *, timeout_s: float = WAIT_S) -> About:
        """Who answers."""
        return self._endpoints.call("status", pb.StatusRequest(), self._about, timeout_s).result()

    def members(self) -> "list[EtcdStore]":
        ca, cert, key = self._keys
        return [EtcdStore([address], self._cluster, ca=ca, cert=cert, key=key) for address in self._addresses]

    def turn(self) -> None:
        self._endpoints.avoid(self._endpoints.current())

    def close(self) -> None:
        self._endpoints.close()

    def _about(self, status: pb.StatusResponse) -> About:
        return About(self._endpoints.current().address, status.version, status.dbSize, status.leader != 0)


class _Read:
    """A read in parts where it does not fit one transaction or one answer: the first gives the revision that the others are read at."""

    def __init__(self, store: EtcdStore, gets: Sequence[Get], timeout_s: float) -> None:
        self.future: Future[Outcome] = Future()
        self.future.set_running_or_notify_cancel()
        self._store, self._left, self._deadline_s = store, gets, time.monotonic() + timeout_s
        self._most = limits.ETCD_TRANSACTION_MAX
        self._found = Outcome(True, 0, ())
        self._next_part()

    def _next_part(self) -> None:
        gets = self._left[: self._most]
        if self._found.revision:
            gets = [replace(get, revision=get.revision or self._found.revision) for get in gets]
        self._store.commit_soon((), gets, timeout_s=self._deadline_s - time.monotonic()).add_done_callback(self._answered)

    def _answered(self, part: Future[Outcome]) -> None:
        failure = part.exception()
        asked = min(self._most, len(self._left))
        if isinstance(failure, AnswerTooLarge) and asked > 1:
            self._most = asked // 2
        elif failure:
            self.future.set_exception(failure)
            return
        else:
            self._take(part.result())
            self._left = self._left[asked:]
            if not self._left:
                self.future.set_result(self._found)
                return
        self._next_part()

    def _take(self, part: Outcome) -> None:
        self._found = Outcome(True, self._found.revision or part.revision, self._found.results + part.results)


def _lease(granted: pb.LeaseGrantResponse) -> int:
    return granted.ID


def _ttl_s(kept: pb.LeaseKeepAliveResponse) -> float:
    return float(kept.TTL)


def _credentials(ca: Path | None, cert: Path | None, key: Path | None) -> grpc.ChannelCredentials | None:
    """What TLS needs; None without an authority: no TLS."""
    if ca is None:
        return None
    return grpc.ssl_channel_credentials(ca.read_bytes(), key.read_bytes() if key else None, cert.read_bytes() if cert else None)
