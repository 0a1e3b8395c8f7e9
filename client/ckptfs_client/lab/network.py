"""Owns the wires of a lab: a switch (a bridge in a namespace of its own, where etcd runs too) and a veth pair to each node.

`cut` takes a node's link down at the switch, so that it reaches nobody, etcd neither; `slow` limits it in both directions.
If we die here: `connect` may be called again, and a namespace takes its interfaces along when it goes.
"""

from pathlib import Path
from typing import Any

from ckptfs_client.lab import namespaces
from ckptfs_client.lab.plan import ETCD_ADDRESS, PREFIX_LENGTH, LabNode, Plan

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
    namespaces.make_namespace(get_namespace_path(plan, BRIDGE))

    def act() -> None:
        with _route() as route:
            route.link("set", index=LOOPBACK, state="up")
            if not route.link_lookup(ifname=BRIDGE):
                route.link("add", ifname=BRIDGE, kind="bridge")
                index = _index(route, BRIDGE)
                route.addr("add", index=index, address=ETCD_ADDRESS, prefixlen=PREFIX_LENGTH)
                route.link("set", index=index, state="up")

    namespaces.run_in_namespace(get_namespace_path(plan, BRIDGE), act)


def connect(node: LabNode) -> None:
    """A node's namespace, its card and its port at the switch."""
    node_namespace = get_namespace_path(node.plan, node.name)
    namespaces.make_namespace(node_namespace)

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

    namespaces.run_in_namespace(get_namespace_path(node.plan, BRIDGE), plug)
    namespaces.run_in_namespace(node_namespace, configure)


def set_link(node: LabNode, *, up: bool) -> None:
    """Join a node's port to the others, or part it from them."""

    def act() -> None:
        with _route() as route:
            route.link("set", index=_index(route, _port(node)), state="up" if up else "down")

    namespaces.run_in_namespace(get_namespace_path(node.plan, BRIDGE), act)


def set_rate(node: LabNode, bits_per_s: int | None) -> None:
    """Limit what a node sends and gets, each; None: no limit. (tbf, since not every kernel has netem.)"""

    def limit(name: str) -> None:
        with _route() as route:
            index = _index(route, name)
            if bits_per_s is not None:
                route.tc("replace", "tbf", index, rate=bits_per_s // 8, burst=BURST_BYTES, latency=f"{LATENCY_MS}ms")
            elif _is_limited(route, index):
                route.tc("del", index=index, parent=0xFFFF_FFFF)

    namespaces.run_in_namespace(get_namespace_path(node.plan, BRIDGE), lambda: limit(_port(node)))
    namespaces.run_in_namespace(get_namespace_path(node.plan, node.name), lambda: limit(CARD))


def list_link_states(plan: Plan) -> dict[str, tuple[bool, bool]]:
    """{node: (its link is up, it is slowed down)}, of those that are connected."""

    def act() -> dict[str, tuple[bool, bool]]:
        found = {}
        with _route() as route:
            for node in plan.all_nodes():
                for link in route.get_links(ifname=_port(node)):
                    found[node.name] = (bool(link["flags"] & 1), _is_limited(route, link["index"]))
        return found

    return (
        namespaces.run_in_namespace(get_namespace_path(plan, BRIDGE), act)
        if namespaces.has_namespace(get_namespace_path(plan, BRIDGE))
        else {}
    )


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
