"""A real etcd for tests, on ports of the loopback that were free, with its data in a directory of its own.

`etcd` is the fixture: one member, answering. A member can be stopped as a crash stops it, started again on its data, and paused.
"""

import os
import random
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from daemon_under_test import eventually

from ckptfs.errors import StoreUnreachable
from ckptfs.protocol import etcd_pb2 as pb
from ckptfs.store.etcd import EtcdStore
from ckptfs.store.kv import Get

STARTS_MAX = 5
PORTS = range(20_000, 32_000)
_claims: list[socket.socket] = []


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody listens on, and that no other process of tests gets while this one lives.

    A server may be started later, or again. Below `PORTS.stop` nobody gets a port by chance, as a client or a server of any port would.
    """
    chosen: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0ckptfs-test-port-{port}")
            with socket.socket() as one:
                one.bind(("127.0.0.1", port))
        except OSError:
            claim.close()
            continue
        _claims.append(claim)
        chosen.append(port)
        if len(chosen) == count:
            return chosen
    raise AssertionError("no port is free")


def node_options(etcd: str, cluster: str = "test", node: str = "one") -> dict[str, str]:
    """Options that make a daemon a node of a cluster. `etcd`: addresses, joined by a plus sign."""
    return {"cluster": cluster, "etcd": etcd, "node": node, "insecure": "true", "listen": f"127.0.0.1:{free_ports(1)[0]}"}


class Member:
    """One server. It ends with this process, whatever happens."""

    def __init__(self, name: str, directory: Path, ports: tuple[int, int], tls: Sequence[str], more: Sequence[str]) -> None:
        self.name, self.directory, self._tls, self._more = name, directory, tls, more
        self.address = f"127.0.0.1:{ports[0]}"
        self.peer = f"http://127.0.0.1:{ports[1]}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, all_members: str) -> None:
        """All_members: NAME=URL of each, joined by commas. Returns at once."""
        url = f"{'https' if self._tls else 'http'}://{self.address}"
        # A member alone elects itself, the sooner the better; several need time to hear of one another on a busy machine.
        heartbeat_ms, election_ms = (100, 1000) if "," in all_members else (20, 100)
        arguments = {
            "name": self.name, "data-dir": self.directory / self.name, "listen-client-urls": url, "advertise-client-urls": url,
            "listen-peer-urls": self.peer, "initial-advertise-peer-urls": self.peer, "initial-cluster": all_members,
            "heartbeat-interval": heartbeat_ms, "election-timeout": election_ms, "log-level": "warn",
        }  # fmt: skip
        command = ["setpriv", "--pdeathsig", "KILL", "etcd", "--unsafe-no-fsync", *self._tls, *self._more]
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [*command, *(f"--{key}={value}" for key, value in arguments.items())], stdout=log, stderr=log, env=_environment()
            )

    @property
    def log(self) -> Path:
        return self.directory / f"{self.name}.log"

    def died(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def stop(self) -> None:
        """As a crash would; the data stay."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)
            self._process = None

    def pause(self) -> None:
        """It keeps its connections and answers nothing."""
        self._signal(signal.SIGSTOP)
        eventually(self._stands_still, what="every thread of etcd has stopped")

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _stands_still(self) -> bool:
        assert self._process is not None
        threads = Path(f"/proc/{self._process.pid}/task").glob("*/stat")
        return all(thread.read_text().rpartition(")")[2].split()[0] == "T" for thread in threads)

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)


class Etcd:
    """The members of one etcd; `stop`, `start`, `pause` and `resume` mean all of them."""

    def __init__(self, directory: Path, members: int, tls: Sequence[str], more: Sequence[str]) -> None:
        self._directory, self._count, self._tls, self._more = directory, members, tls, more
        self.members: list[Member] = []

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(member.address for member in self.members)

    @property
    def joined(self) -> str:
        return "+".join(self.addresses)

    def begin(self) -> "Etcd":
        """Start for the first time; when somebody takes a port meanwhile, again with others."""
        for _ in range(STARTS_MAX):
            ports = free_ports(2 * self._count)
            self.members = [
                Member(f"m{n}", self._directory, (ports[2 * n], ports[2 * n + 1]), self._tls, self._more) for n in range(self._count)
            ]
            self.start_soon()
            try:
                if eventually(self._settled, what="etcd answers") == "answers":
                    return self
            except AssertionError as failure:
                failure.add_note(self._read_log_ends())
                raise
            self.stop()
        raise AssertionError(f"etcd did not start: {self._read_log_ends()}")

    def _read_log_ends(self) -> str:
        return "\n".join(f"{member.name}: {member.log.read_text()[-2000:]}" for member in self.members)

    def start_soon(self) -> None:
        """Start all; returns at once."""
        for member in self.members:
            self.start_member(member)

    def start_member(self, member: Member) -> None:
        member.start(",".join(f"{one.name}={one.peer}" for one in self.members))

    def start(self) -> None:
        """Start all again on their data, and wait until they answer."""
        self.start_soon()
        assert eventually(self._settled, what="etcd answers") == "answers"

    def stop(self) -> None:
        for member in self.members:
            member.stop()

    def wipe(self) -> None:
        for member in self.members:
            shutil.rmtree(self._directory / member.name)

    def pause(self) -> None:
        for member in self.members:
            member.pause()

    def resume(self) -> None:
        for member in self.members:
            member.resume()

    def compact(self, revision: int) -> None:
        with grpc.insecure_channel(self.addresses[0]) as channel:
            compact = channel.unary_unary("/etcdserverpb.KV/Compact")
            # A message whose field 1 is the revision is a lease's request as well.
            compact(pb.LeaseRevokeRequest(ID=revision).SerializeToString(), timeout=60, wait_for_ready=True)

    def _settled(self) -> str:
        if any(member.died() for member in self.members):
            return "died"
        if self._tls:
            return "answers" if all(_listens(member) for member in self.members) else ""
        return "answers" if all(revision_at(member) for member in self.members) else ""


def _environment() -> dict[str, str]:
    """Without settings that are meant for another etcd."""
    return {key: value for key, value in os.environ.items() if not key.startswith("ETCD_")}


def revision_at(member: Member) -> int:
    """The revision of a member; 0: it does not answer."""
    with suppress(StoreUnreachable), closing(EtcdStore([member.address], "anyone")) as store:
        return store.read([Get(b"")], timeout_s=1.0).revision
    return 0


def _listens(member: Member) -> bool:
    host, port = member.address.split(":")
    with socket.socket() as one:
        return one.connect_ex((host, int(port))) == 0


def start_etcd(directory: Path, members: int = 1, tls: Sequence[str] = (), more: Sequence[str] = ()) -> Etcd:
    """An etcd that answers, with `tls` and `more` among its arguments; whoever starts it stops it. Without etcd the test is skipped."""
    if shutil.which("etcd") is None:
        pytest.skip("NO ETCD HERE: etcd is not installed")
    return Etcd(directory, members, tls, more).begin()


@contextmanager
def serving(directory: Path, **how: Any) -> Iterator[Etcd]:
    """An etcd as `start_etcd` starts it, until the block ends."""
    started = start_etcd(directory, **how)
    try:
        yield started
    finally:
        started.stop()


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    (tmp_path / "etcd").mkdir()
    with serving(tmp_path / "etcd") as started:
        yield started


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Etcd]:
    """An etcd of three members."""
    with serving(tmp_path, members=3) as started:
        yield started
