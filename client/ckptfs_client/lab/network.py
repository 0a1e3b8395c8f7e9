"""Owns the wires of a lab: a switch (a bridge in a namespace of its own, where etcd runs too) and a veth pair to each node.

`cut` takes a node's link down at the switch, so that it reaches nobody, etcd neither; `slow` limits it in both directions.
If we die here: `connect` may be called again, and a namespace takes its interfaces along when it goes.

Owns the network namespaces of a lab: one file for each in DIR/net, on which the namespace is mounted; so they outlive the command.

They are entered by setns(2) in a thread of our own, so the rest of the process stays where it is. Mount namespaces are not touched:
every mount of the lab is seen from everywhere. A process belongs to a node when it runs in its namespace, whatever its pid.
If we die here: the files and mounts are found again by name.
"""

import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ckptfs_client.errors import CommandFailed
from ckptfs_client.lab.layout import ETCD_ADDRESS, PREFIX_LENGTH, LabNode, Plan

Result = TypeVar("Result")
CLONE_NEWNET = 0x4000_0000
MS_BIND = 4096
MNT_FORCE, MNT_DETACH = 1, 2
ACT_WAIT_S = 30.0
_libc = ctypes.CDLL(None, use_errno=True)


def make_namespace(path: Path) -> None:
    """A new network namespace, mounted on `path`; one that is there already stays. Raises OSError."""
    if has_namespace(path):
        return
    path.touch()

    def unshared() -> None:
        _checked(_libc.unshare(CLONE_NEWNET), "a network namespace cannot be made")
        _checked(_libc.mount(b"/proc/thread-self/ns/net", os.fsencode(path), None, MS_BIND, None), f"{path} cannot be mounted")

    _in_a_thread(unshared)


def remove_namespace(path: Path) -> None:
    """Let go of a namespace; it ends, with its interfaces, when the last process in it has ended."""
    if has_namespace(path):
        detach_mount(path)
    path.unlink(missing_ok=True)


def has_namespace(path: Path) -> bool:
    """Whether a namespace is mounted on `path`."""
    return get_namespace_id(path) is not None


def get_namespace_id(path: Path) -> tuple[int, int] | None:
    """What tells a namespace from every other, as /proc/PID/ns/net shows it too; None when none is mounted there."""
    try:
        found = os.stat(path)
        own = os.stat("/proc/self/ns/net")
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if found.st_dev == own.st_dev else None


def enter_namespace(path: Path) -> None:
    """The calling thread, and what it starts, is in that namespace from now on. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _checked(_libc.setns(fd, CLONE_NEWNET), f"{path} cannot be entered")
    finally:
        os.close(fd)


def run_in_namespace(path: Path, act: Callable[[], Result]) -> Result:
    """The result of `act`, called in that namespace by a thread of its own. Raises what it raises, and Failed when it takes too long."""

    def entered() -> Result:
        enter_namespace(path)
        return act()

    return _in_a_thread(entered)


def detach_mount(point: Path) -> None:
    """umount2(2), lazily; what is not mounted is no error."""
    _libc.umount2(os.fsencode(point), MNT_DETACH)


def unmount(point: Path) -> None:
    """umount2(2) of what nobody uses. Raises OSError."""
    _checked(_libc.umount2(os.fsencode(point), 0), f"{point} cannot be unmounted")


def abort_mount(point: Path) -> None:
    """Detach a FUSE mount after its connection was ended: system calls that hang in it return with an error."""
    _libc.umount2(os.fsencode(point), MNT_FORCE | MNT_DETACH)


def _in_a_thread(act: Callable[[], Result]) -> Result:
    results: list[Result] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(act())
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=run, name="in a namespace", daemon=True)
    thread.start()
    thread.join(ACT_WAIT_S)
    if failures:
        raise failures[0]
    if not results:
        raise CommandFailed(f"the kernel did not set up the lab's network within {ACT_WAIT_S:.0f} s")
    return results[0]


def _checked(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


BRIDGE = "switch"
CARD = "eth0"
LOOPBACK = 1
BURST_BYTES = 256 * 1024
LATENCY_MS = 200


def get_namespace_path(plan: Plan, name: str) -> Path:
    """The namespace of a node, or of the switch."""
    return plan.directory / "net" / name


def make_switch(plan: Plan) -> None:
    """The switch, with etcd's address."""
    (plan.directory / "net").mkdir(exist_ok=True)
    make_namespace(get_namespace_path(plan, BRIDGE))

    def act() -> None:
        with _route() as route:
            route.link("set", index=LOOPBACK, state="up")
            if not route.link_lookup(ifname=BRIDGE):
                route.link("add", ifname=BRIDGE, kind="bridge")
                index = _index(route, BRIDGE)
                route.addr("add", index=index, address=ETCD_ADDRESS, prefixlen=PREFIX_LENGTH)
                route.link("set", index=index, state="up")

    run_in_namespace(get_namespace_path(plan, BRIDGE), act)


def connect(node: LabNode) -> None:
    """A node's namespace, its card and its port at the switch."""
    node_namespace = get_namespace_path(node.plan, node.name)
    make_namespace(node_namespace)

    def plug() -> None:
        with open(node_namespace, "rb") as namespace, _route() as route:
            if not route.link_lookup(ifname=_port(node)):
                route.link("add", ifname=_port(node), kind="veth", peer={"ifname": CARD, "net_ns_fd": namespace.fileno()})
                route.link("set", index=_index(route, _port(node)), master=_index(route, BRIDGE), state="up")

    def configure() -> None:
        with _route() as route:
            index = _index(route, CARD)
            route.link("set", index=LOOPBACK, state="up")
            if not route.get_addr(index=index, address=node.address):
                route.addr("add", index=index, address=node.address, prefixlen=PREFIX_LENGTH)
            route.link("set", index=index, state="up")

    run_in_namespace(get_namespace_path(node.plan, BRIDGE), plug)
    run_in_namespace(node_namespace, configure)


def set_link(node: LabNode, *, up: bool) -> None:
    """Join a node's port to the others, or part it from them."""

    def act() -> None:
        with _route() as route:
            route.link("set", index=_index(route, _port(node)), state="up" if up else "down")

    run_in_namespace(get_namespace_path(node.plan, BRIDGE), act)


def set_rate(node: LabNode, bits_per_s: int | None) -> None:
    """Limit what a node sends and gets, each; None: no limit. (tbf, since not every kernel has netem.)"""

    def limit(name: str) -> None:
        with _route() as route:
            index = _index(route, name)
            if bits_per_s is not None:
                route.tc("replace", "tbf", index, rate=bits_per_s // 8, burst=BURST_BYTES, latency=f"{LATENCY_MS}ms")
            elif _is_limited(route, index):
                route.tc("del", index=index, parent=0xFFFF_FFFF)

    run_in_namespace(get_namespace_path(node.plan, BRIDGE), lambda: limit(_port(node)))
    run_in_namespace(get_namespace_path(node.plan, node.name), lambda: limit(CARD))


def list_link_states(plan: Plan) -> dict[str, tuple[bool, bool]]:
    """{node: (its link is up, it is slowed down)}, of those that are connected."""

    def act() -> dict[str, tuple[bool, bool]]:
        found = {}
        with _route() as route:
            for node in plan.all_nodes():
                for link in route.get_links(ifname=_port(node)):
                    found[node.name] = (bool(link["flags"] & 1), _is_limited(route, link["index"]))
        return found

    return run_in_namespace(get_namespace_path(plan, BRIDGE), act) if has_namespace(get_namespace_path(plan, BRIDGE)) else {}


def _is_limited(route: Any, index: int) -> bool:
    return any(one.get_attr("TCA_KIND") == "tbf" for one in route.get_qdiscs(index=index))


def _port(node: LabNode) -> str:
    return f"port{node.number}"


def _index(route: Any, name: str) -> int:
    found: list[int] = route.link_lookup(ifname=name)
    return found[0]


def _route() -> Any:
    # Imported here: it costs a tenth of a second, which `ckptfs --help` need not pay.
    from pyroute2.iproute.linux import IPRoute

    return IPRoute()
