"""A daemon becomes a node of a cluster at its start, or says in one sentence why not (P1, P11)."""

import signal
from collections.abc import Callable
from contextlib import closing

import pytest
from daemon_under_test import DaemonUnderTest, NotStarted, eventually, shorten
from etcd_server import Etcd, node_options

from ckptfs.clique.membership import Node, load_nodes
from ckptfs.store.etcd import EtcdStore

Make = Callable[..., DaemonUnderTest]


def options(etcd: str, node: str) -> dict[str, str]:
    return {**node_options(etcd, "c", node), "failure_domain": f"rack-of-{node}"}


def living(etcd: Etcd) -> dict[str, Node]:
    with closing(EtcdStore(etcd.addresses, "c")) as store:
        return {node.name: node for node in load_nodes(store)[0]}


def test_a_node_joins_and_comes_back_as_the_same(etcd: Etcd, make_daemon: Make) -> None:
    """Number and name stay; who starts again at once does not wait for its former lease."""
    asked = options(etcd.addresses[0], "one")
    daemon = make_daemon(**asked)
    node = eventually(lambda: living(etcd).get("one"), what="it lives")
    assert (node.address, node.domain, node.rank) == (asked["listen"], "rack-of-one", node.number)
    assert node.number > 0 and node.capacity_bytes > 0
    (daemon.path / "file").write_bytes(b"x")
    daemon.kill("mover")
    again = eventually(lambda: (now := living(etcd).get("one")) and now.incarnation != node.incarnation and now, what="it lives again")
    assert again.number == node.number and (daemon.path / "file").read_bytes() == b"x"


def test_a_second_daemon_with_the_name_is_refused(etcd: Etcd, make_daemon: Make) -> None:
    """P11."""
    make_daemon(**options(etcd.addresses[0], "one"))
    eventually(lambda: "one" in living(etcd), what="the first lives")
    with pytest.raises(NotStarted, match="another daemon is in the cluster as node one"):
        make_daemon(start=False, env=shorten(NAME_WAIT_S=2), **options(etcd.addresses[0], "one")).start()
    make_daemon(**options(etcd.addresses[0], "two"))
    assert eventually(lambda: {"one", "two"} <= set(living(etcd)), what="both live")


def test_without_etcd_the_first_start_is_refused_and_a_later_one_is_not(etcd: Etcd, make_daemon: Make) -> None:
    """P1: only joining needs the store."""
    daemon = make_daemon(start=False, **options(etcd.addresses[0], "one"))
    etcd.stop()
    with pytest.raises(NotStarted, match="node one has never been in the cluster c"):
        daemon.start()
    etcd.start()
    daemon.start()
    daemon.expect_warning("etcd")
    daemon.unmount()
    etcd.stop()
    daemon.start()
    (daemon.path / "file").write_bytes(b"island")
    assert (daemon.path / "file").read_bytes() == b"island"
    etcd.start()
    eventually(lambda: "one" in living(etcd), what="it lives again")
    daemon.settle()
    assert (daemon.pfs / "file").read_bytes() == b"island"


def test_a_file_open_at_the_end_is_published_and_written_back(etcd: Etcd, make_daemon: Make) -> None:
    """G1: a daemon that ends closes what is still open; the drain that follows may act on that, and does not wait for its deadline."""
    daemon = make_daemon(**options(etcd.addresses[0], "one"))
    daemon.expect_warning("in use; it is detached|no other node of the cluster|too few")
    assert daemon.process is not None
    with open(daemon.path / "log", "wb", buffering=0) as file:
        file.write(b"x" * 5000)
        daemon.process.send_signal(signal.SIGTERM)
        eventually(lambda: "is detached" in daemon.log or "is unmounted" in daemon.log, what="it is unmounted")
    assert daemon.process.wait(120) == 0
    assert (daemon.pfs / "log").read_bytes() == b"x" * 5000, daemon.tail()
    assert "drained until the deadline" not in daemon.log


def test_a_catalog_stays_in_its_cluster(etcd: Etcd, make_daemon: Make) -> None:
    """P11: what lies there would be taken for something else."""
    daemon = make_daemon(**options(etcd.addresses[0], "one"))
    daemon.unmount()
    given = dict(daemon.options)
    daemon.options |= {"cluster": "other"}
    with pytest.raises(NotStarted, match="belong to the cluster c, and cluster=other is configured"):
        daemon.start()
    daemon.options = {key: value for key, value in given.items() if key not in options("", "one")}
    with pytest.raises(NotStarted, match="belong to the cluster c, and none is configured"):
        daemon.start()


@pytest.mark.alone
def test_what_was_written_alone_does_not_come_into_a_cluster(make_daemon: Make) -> None:
    daemon = make_daemon()
    (daemon.path / "file").write_bytes(b"x")
    daemon.unmount()
    daemon.options |= options("127.0.0.1:1", "one")
    with pytest.raises(NotStarted, match=r"were written without a cluster.*ckptfs drain.*empty one"):
        daemon.start()
