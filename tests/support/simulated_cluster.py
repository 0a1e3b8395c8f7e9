"""Thousands of nodes in one process and in virtual time: what a node sends to and gets from the shared store.

Some nodes are whole: membership, roster, placement, and a catalog whose sharing is the mount's own. They write their checkpoints at
the same time into one directory, and the store takes its time to answer, so they get in one another's way as they would. All others
are records in the store that come and go. Messages are counted one by one in both directions, with the length that etcd's protocol
gives them. The same seed gives the same figures.
"""

import contextlib
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import trio
import trio.testing
from memory_store import MemoryEtcd, MemoryStore, MemoryWatch
from shared_catalogs import Node as Station
from shared_catalogs import Slow

from ckptfs import limits
from ckptfs.catalog import contents, identity
from ckptfs.clique import locations
from ckptfs.clique.membership import (
    NODES_END,
    NODES_PREFIX,
    MemberTable,
    Node,
    NodeLease,
    decode_node,
    encode_node,
    load_nodes,
    node_key,
    register,
)
from ckptfs.clique.placement import choose_peers
from ckptfs.model import ROOT, Tier
from ckptfs.store.etcd import EtcdCodec
from ckptfs.store.kv import Compare, Delete, Get, Item, Operation, Outcome, Put

WHOLE = 3
WAY_S = 0.001
"""How long a message to or from the store travels at most."""
PUT_COST = 2
ITEM_BYTES = 24
"""Revisions, version, lease and lengths around a key and its value in an answer."""
WAIT_S = limits.ETCD_WAIT_S


@dataclass
class Bill:
    """What was sent and received, by the purpose that was set."""

    messages: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    purpose: str = "join"

    def note(self, count: int, length: int, purpose: str = "") -> None:
        self.messages[purpose or self.purpose] += count
        self.bytes[purpose or self.purpose] += length


class Metered(Slow):
    """A way to the store that counts. A question and its answer are two messages."""

    def __init__(self, etcd: MemoryEtcd, dice: random.Random) -> None:
        super().__init__(etcd, dice, WAY_S)
        self.bill = Bill()
        self._wire = EtcdCodec("c")

    def read(self, gets: Sequence[Get], *, timeout_s: float = WAIT_S) -> Outcome:
        outcome = super().read(gets, timeout_s=timeout_s)
        self._note((), gets, (), outcome)
        return outcome

    def commit(
        self, compares: Sequence[Compare], changes: Sequence[Operation], otherwise: Sequence[Get] = (), *, timeout_s: float = WAIT_S
    ) -> Outcome:
        outcome = super().commit(compares, changes, otherwise, timeout_s=timeout_s)
        self._note(compares, changes, otherwise, outcome)
        return outcome

    def keep_alive(self, lease: int, *, timeout_s: float = WAIT_S) -> float:
        self.bill.note(2, 2 * ITEM_BYTES, "beat")
        return super().keep_alive(lease)

    def grant(self, ttl_s: int, *, timeout_s: float = WAIT_S) -> int:
        self.bill.note(2, 2 * ITEM_BYTES)
        return super().grant(ttl_s)

    def told(self, watch: MemoryWatch) -> list[tuple[bytes, Item | None]]:
        """What a watch has to tell, counted: one message for each revision."""
        told = watch.poll()
        events = told.events if told is not None else ()
        length = sum(self._length(event.key, event.item) for event in events)
        self.bill.note(len({event.revision for event in events}), length, "watch")
        return [(event.key, event.item) for event in events]

    def _note(self, compares: Sequence[Compare], changes: Sequence[Operation], otherwise: Sequence[Get], outcome: Outcome) -> None:
        answer = ITEM_BYTES + sum(self._length(item.key, item) for items in outcome.results for item in items)
        self.bill.note(2, self._wire.encode_transaction(compares, changes, otherwise).ByteSize() + answer + PUT_COST * len(changes))

    def _length(self, key: bytes, item: Item | None) -> int:
        return ITEM_BYTES + len(self._wire.encode_key(key)) + (len(item.value) if item is not None else 0)


class Whole(Station):
    """One node with all of its parts that speak to the store."""

    store: Metered

    def __init__(self, place: Path, etcd: MemoryEtcd, name: str, number: int, dice: random.Random) -> None:
        super().__init__(place / name, number, Metered(etcd, dice))
        catalog = identity.get_catalog_id(self.db)
        assert register(self.store, name, catalog, number) == number
        self.node = node(self.number, name)
        self.node_lease = NodeLease(self.store, self.node, catalog, trio.current_time)
        self.members = MemberTable(self.node)
        self.deaths = 0

    async def live(self) -> None:
        """Beat and follow, as `ckptfs_daemon.member` does."""
        nodes, revision = load_nodes(self.store)
        self.members.replace_nodes(nodes, trio.current_time())
        watch = self.store.watch(NODES_PREFIX, NODES_END, revision + 1)
        while True:
            self.node_lease.renew()
            self.members.mark_connected(trio.current_time())
            for key, item in self.store.told(watch):
                found = decode_node(item.value) if item is not None else None
                if found is not None:
                    self.members.mark_alive(found)
                else:
                    self.members.mark_gone(int(key[len(NODES_PREFIX) :], 16), trio.current_time())
                    self.deaths += 1
            await trio.sleep(limits.NODE_LEASE_RENEW_S)

    # --- a checkpoint ------------------------------------------------------------------------------------------------

    async def directory(self, name: bytes) -> int:
        """Look it up, or make it: whoever comes first does."""
        self.store.bill.purpose = "names"
        with contextlib.suppress(FileNotFoundError):
            return (await self.lookup(ROOT, name)).id
        with contextlib.suppress(FileExistsError):
            await self.mkdir(name.decode())
        return (await self.lookup(ROOT, name)).id

    async def write(self, path: str, size: int) -> int:
        """Create, write, close; its content."""
        self.store.bill.purpose = "names"
        made = await self.make(path)
        with self.db.transaction():
            content = contents.insert_content(self.db, made.id, Tier.RAM)
        with self.db.transaction():
            contents.mark_closed(self.db, made.id, content, size, 1, 2)
        await self.sharing.wait_published()
        return content

    async def seal(self, content: int) -> None:
        """The mover has computed the digest."""
        self.store.bill.purpose = "copies"
        with self.db.transaction():
            self.db.run("UPDATE content SET state = 2, digest = ? WHERE id = ?", bytes(16), content)
        await self.sharing.wait_published()

    def peers(self, factor: int) -> list[int]:
        return [peer.number for peer in choose_peers(self.members.build_view(), self.number, factor, 1)]

    def hold(self, other: "Whole", content: int) -> None:
        """A copy came from another node."""
        found, bill = contents.get_content(other.db, content), self.store.bill
        assert found is not None
        now, bill.purpose = bill.purpose, "copies"
        locations.announce(self.store, self.number, [(found, True)])
        bill.purpose = now


def node(number: int, name: str) -> Node:
    """A record of the usual length."""
    return Node(number, name, f"{name}.cluster.example.org:7420", number, f"rack{number // 16:04}", 1 << 38, f"{number:08x}.1")


@dataclass(frozen=True)
class Costs:
    """What one node of `nodes` sends and gets: per checkpoint, per hour of living, and once at its start."""

    nodes: int
    writers: int
    checkpoint: dict[str, tuple[float, float]]
    beat_hour: tuple[float, float]
    watch_hour: tuple[float, float]
    join: tuple[float, float]
    changes_hour: float


def together(cost: Costs) -> tuple[float, float]:
    pairs = list(cost.checkpoint.values())
    return sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)


class Cluster:
    """`count` nodes, of which a few are whole."""

    def __init__(self, count: int, writers: int, place: Path, seed: int) -> None:
        self.count, self.writers, self.place = count, writers, place
        self.dice = random.Random(seed)
        self.etcd = MemoryEtcd(trio.current_time)
        self.others = MemoryStore(self.etcd)
        numbers = range(writers + 1, count + 1)
        self.plain = {number: node(number, f"n{number:05}") for number in numbers}
        for one in self.plain.values():
            self.put(one)
        self.whole: list[Whole] = []
        self.changes = 0

    def start(self) -> None:
        numbers = range(1, self.writers + 1)
        self.whole = [Whole(self.place, self.etcd, f"n{number:05}", number, self.dice) for number in numbers]

    def put(self, one: Node) -> None:
        self.others.commit([], [Put(node_key(one.number), encode_node(one))])

    async def churn(self, hours_between: float, hours: float) -> None:
        """Each plain node dies once in so many hours, at a random time, and is back a minute later."""
        async with trio.open_nursery() as nursery:
            with trio.move_on_after(3600 * hours):
                while True:
                    await trio.sleep(self.dice.expovariate(len(self.plain) / (3600 * hours_between)) if self.plain else float("inf"))
                    nursery.start_soon(self._restart, self.dice.choice(list(self.plain.values())))

    async def _restart(self, one: Node) -> None:
        self.others.commit([], [Delete(node_key(one.number))])
        await trio.sleep(60)
        self.put(one)
        self.changes += 2

    async def checkpoint(self, step: int, factor: int) -> None:
        """Every whole node writes a file; each of its peers, or another whole node in a peer's place, takes a copy."""

        async def one(at: int) -> None:
            here = self.whole[at]
            directory = f"step_{step:06}"
            await here.directory(directory.encode())
            content = await here.write(f"{directory}/rank_{here.number:05}.pt", 1 << 30)
            await here.seal(content)
            for place in range(1, 1 + len(here.peers(factor))):
                self.whole[(at + place) % self.writers].hold(here, content)

        async with trio.open_nursery() as nursery:
            for at in range(self.writers):
                nursery.start_soon(one, at)


async def _measure(cluster: Cluster, *, steps: int, factor: int, hours: float, hours_between: float) -> Costs:
    cluster.start()
    bills = [one.store.bill for one in cluster.whole]
    async with trio.open_nursery() as nursery:
        for one in cluster.whole:
            nursery.start_soon(one.live)
            nursery.start_soon(one.sharing.run)
        await trio.sleep(10)
        before = len(cluster.whole[0].members.build_view())
        joined = _mean(bills, lambda bill: (bill.messages["join"], bill.bytes["join"]))
        for bill in bills:
            bill.messages.clear()
            bill.bytes.clear()
        await cluster.churn(hours_between, hours)
        living = _mean(bills, lambda bill: (bill.messages["beat"] / hours, bill.bytes["beat"] / hours))
        for step in range(steps):
            await cluster.checkpoint(step, factor)
            await trio.sleep(5)
        assert before == cluster.count == len(cluster.whole[0].members.build_view())
        nursery.cancel_scope.cancel()
    kinds = ("names", "copies")
    return Costs(
        cluster.count,
        cluster.writers,
        {kind: _mean(bills, lambda bill, kind=kind: (bill.messages[kind] / steps, bill.bytes[kind] / steps)) for kind in kinds},
        living,
        _mean(bills, lambda bill: (bill.messages["watch"] / hours, bill.bytes["watch"] / hours)),
        joined,
        cluster.changes / hours,
    )


def _mean(bills: list[Bill], of: Callable[[Bill], tuple[float, float]]) -> tuple[float, float]:
    pairs = [of(bill) for bill in bills]
    return sum(pair[0] for pair in pairs) / len(pairs), sum(pair[1] for pair in pairs) / len(pairs)


def measure(
    count: int, *, writers: int = WHOLE, seed: int = 1, steps: int = 4, factor: int = 2, hours: float = 4, hours_between: float = 720
) -> Costs:
    """A cluster of `count` nodes, each of which is restarted once in `hours_between`; `writers` of them write `steps` checkpoints."""

    async def main() -> Costs:
        with tempfile.TemporaryDirectory(prefix="ckptfs-simulated-") as place, ExitStack() as stack:
            cluster = Cluster(count, writers, Path(place), seed)
            try:
                return await _measure(cluster, steps=steps, factor=factor, hours=hours, hours_between=hours_between)
            finally:
                for one in cluster.whole:
                    stack.callback(one.db.close)

    found: Costs = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return found


def table(costs: Sequence[Costs]) -> str:
    names = ("names/checkpoint", "copies/checkpoint", "lease/h", "others come, go/h", "start")
    lines = [f"{'nodes':>7} {'writing':>7} " + " ".join(f"{name:>18}" for name in names)]
    for cost in costs:
        pairs = (cost.checkpoint["names"], cost.checkpoint["copies"], cost.beat_hour, cost.watch_hour, cost.join)
        cells = [f"{messages:.1f} {length / 1000:.2f} kB" for messages, length in pairs]
        lines.append(f"{cost.nodes:>7} {cost.writers:>7} " + " ".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)
