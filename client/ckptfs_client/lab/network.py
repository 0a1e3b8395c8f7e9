"""The network of a lab: namespaces, a switch, and a link to each node.

The switch is a bridge in its own namespace, in which etcd runs too. A veth pair leads from it to the namespace of each node. `set_link`
takes a link down at the switch, so the node reaches no other node and no etcd. `set_rate` limits a link in both directions.

A namespace is kept by a mount on its file in DIR/net, so it outlives the command. It is entered by setns(2) in a thread, so the rest of the
process stays where it is. Mount namespaces are not used: every mount of the lab is visible everywhere. A process belongs to a node if it
runs in the node's network namespace.

Crash safety: `make_switch` and `connect` may be repeated; namespaces and mounts are found again by name.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ckptfs import disk, libc
from ckptfs.bounded_waits import run_in_time
from ckptfs.errors import TimedOut
from ckptfs_client.errors import CommandFailed
from ckptfs_client.lab.layout import ETCD_ADDRESS, PREFIX_LENGTH, LabNode, Plan

Result = TypeVar("Result")
CLONE_NEWNET = 0x4000_0000
ACT_WAIT_S = 30.0
BRIDGE = "switch"
CARD = "eth0"
LOOPBACK = 1
BURST_BYTES = 256 * 1024
LATENCY_MS = 200


def make_switch(plan: Plan) -> None:
    """Create the switch, with etcd's address."""
    plan.networks.mkdir(exist_ok=True)
    make_namespace(plan.switch)

    def act(route: Any) -> None:
        route.link("set", index=LOOPBACK, state="up")
        if not route.link_lookup(ifname=BRIDGE):
            route.link("add", ifname=BRIDGE, kind="bridge")
            index = _index(route, BRIDGE)
            route.addr("add", index=index, address=ETCD_ADDRESS, prefixlen=PREFIX_LENGTH)
            route.link("set", index=index, state="up")

    _configure(plan.switch, act)


def connect(node: LabNode) -> None:
    """Create a node's namespace, its interface and its port at the switch."""
    make_namespace(node.namespace)

    def plug(route: Any) -> None:
        if not route.link_lookup(ifname=_port(node)):
            with open(node.namespace, "rb") as namespace:
                route.link("add", ifname=_port(node), kind="veth", peer={"ifname": CARD, "net_ns_fd": namespace.fileno()})
            route.link("set", index=_index(route, _port(node)), master=_index(route, BRIDGE), state="up")

    def configure(route: Any) -> None:
        index = _index(route, CARD)
        route.link("set", index=LOOPBACK, state="up")
        if not route.get_addr(index=index, address=node.address):
            route.addr("add", index=index, address=node.address, prefixlen=PREFIX_LENGTH)
        route.link("set", index=index, state="up")

    _configure(node.plan.switch, plug)
    _configure(node.namespace, configure)


def set_link(node: LabNode, *, up: bool) -> None:
    """Take the link of a node up or down."""
    _configure(node.plan.switch, lambda route: route.link("set", index=_index(route, _port(node)), state="up" if up else "down"))


def set_etcd_route(node: LabNode, *, up: bool) -> None:
    """Let a node reach etcd, or only the other nodes."""
    from pyroute2.netlink.exceptions import NetlinkError

    with contextlib.suppress(NetlinkError):  # It is so already.
        _configure(node.namespace, lambda route: route.route("del" if up else "add", dst=f"{ETCD_ADDRESS}/32", type="blackhole"))


def set_rate(node: LabNode, bits_per_s: int | None) -> None:
    """Limit each direction of a node's link; None: no limit. Uses tbf, because not every kernel has netem."""

    def limit(route: Any, name: str) -> None:
        index = _index(route, name)
        if bits_per_s is not None:
            route.tc("replace", "tbf", index, rate=bits_per_s // 8, burst=BURST_BYTES, latency=f"{LATENCY_MS}ms")
        elif _is_limited(route, index):
            route.tc("del", index=index, parent=0xFFFF_FFFF)

    _configure(node.plan.switch, lambda route: limit(route, _port(node)))
    _configure(node.namespace, lambda route: limit(route, CARD))


def list_link_states(plan: Plan) -> dict[str, tuple[bool, bool]]:
    """Return (link is up, rate is limited) for each connected node."""

    def act(route: Any) -> dict[str, tuple[bool, bool]]:
        found = {node.name: route.get_links(ifname=_port(node)) for node in plan.all_nodes()}
        return {name: (bool(link["flags"] & 1), _is_limited(route, link["index"])) for name, links in found.items() for link in links}

    return _configure(plan.switch, act) if has_namespace(plan.switch) else {}


def _configure(namespace: Path, act: Callable[[Any], Result]) -> Result:
    """Return what `act` returns for the netlink socket of a namespace."""

    def run() -> Result:
        # A lazy import: it takes 0.1 s, which `ckptfs --help` must not pay.
        from pyroute2.iproute.linux import IPRoute

        with IPRoute() as route:
            return act(route)

    return run_in_namespace(namespace, run)


def _is_limited(route: Any, index: int) -> bool:
    return any(one.get_attr("TCA_KIND") == "tbf" for one in route.get_qdiscs(index=index))


def _port(node: LabNode) -> str:
    return f"port{node.number}"


def _index(route: Any, name: str) -> int:
    found: list[int] = route.link_lookup(ifname=name)
    return found[0]


# --- namespaces and mounts --------------------------------------------------------------------------------------------


def make_namespace(path: Path) -> None:
    """Create a network namespace, mounted on `path`, unless it exists. Raises CommandFailed."""
    if has_namespace(path):
        return
    path.touch()

    def unshare() -> None:
        try:
            libc.call("unshare", CLONE_NEWNET)
            libc.mount("/proc/thread-self/ns/net", path, "", libc.MS_BIND)
        except OSError as failure:
            raise CommandFailed(f"a network namespace cannot be made: {failure.strerror}") from failure

    _run_in_thread(unshare)


def has_namespace(path: Path) -> bool:
    return get_namespace_id(path) is not None


def get_namespace_id(path: Path) -> tuple[int, int] | None:
    """Return the id of the namespace on `path` as /proc/PID/ns/net has it, or None without one."""
    try:
        found = os.stat(path)
        own = os.stat("/proc/self/ns/net")
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if found.st_dev == own.st_dev else None


def enter_namespace(path: Path) -> None:
    """Move the calling thread, and what it starts, into a namespace. Raises OSError."""
    with disk.closing(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as fd:
        libc.call("setns", fd, CLONE_NEWNET, path=path)


def run_in_namespace(path: Path, act: Callable[[], Result]) -> Result:
    """Return what `act` returns in a namespace, in a thread. Raises CommandFailed if it takes too long."""

    def entered() -> Result:
        enter_namespace(path)
        return act()

    return _run_in_thread(entered)


def abort_mount(point: Path) -> None:
    """Detach a mount, and abort its FUSE connection: system calls that hang in it fail. Ignores errors."""
    with contextlib.suppress(OSError):
        libc.unmount(point, libc.MNT_FORCE | libc.MNT_DETACH)


def _run_in_thread(act: Callable[[], Result]) -> Result:
    try:
        return run_in_time(act, ACT_WAIT_S, "in a namespace")
    except TimedOut:
        raise CommandFailed(f"the kernel did not set up the lab's network within {ACT_WAIT_S:.0f} s") from None
