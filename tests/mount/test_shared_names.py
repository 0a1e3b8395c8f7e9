"""Two daemons of one cluster on this machine: what one does to names, the other sees (N1). With a real etcd, which may stop in between."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_under_test import DaemonUnderTest
from etcd_server import Etcd, free_ports

pytestmark = [pytest.mark.root, pytest.mark.fuse]


@pytest.fixture
def two(etcd: Etcd) -> Iterator[tuple[Path, Path]]:
    daemons = [node(etcd, name) for name in ("a", "b")]
    try:
        yield daemons[0].start().path, daemons[1].start().path
    finally:
        for daemon in daemons:
            daemon.close()


def node(etcd: Etcd, name: str) -> DaemonUnderTest:
    port = free_ports(1)[0]
    return DaemonUnderTest(
        cluster="test",
        etcd="+".join(etcd.addresses),
        node=name,
        pfs=None,
        nvme=None,
        ram="256M",
        insecure="true",
        listen=f"127.0.0.1:{port}",
    )


def test_names_are_seen_at_once(two: tuple[Path, Path]) -> None:
    a, b = two
    (a / "d").mkdir()
    (a / "d" / "f").write_bytes(b"12345")
    assert os.listdir(b) == ["d"] and os.listdir(b / "d") == ["f"]
    assert (b / "d" / "f").stat().st_size == 5
    os.rename(b / "d" / "f", b / "g")
    assert sorted(os.listdir(a)) == ["d", "g"] and os.listdir(a / "d") == []
    assert not (a / "d" / "f").exists()
    os.unlink(a / "g")
    assert not (b / "g").exists()
    os.rmdir(b / "d")
    assert os.listdir(a) == []
