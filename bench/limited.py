"""Programs with a memory limit: the first file of a kind on a passthrough mount, against the same on a buffered mount.

Usage: limited.py [--rounds 5] [--ram 8G] [--mib 256 1024 3072] [--kib 4 64 1024 4096] [--nvme]. Needs root, memory cgroups, and memory for
both tiers and 4 GiB.
Both sides find 2 GiB written and deleted right before, and no place has an expected size.
"""

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "tests" / "support")]

import suites  # noqa: E402 - beside this file; the tests' daemon is found by the line above
from daemon_under_test import DaemonUnderTest, eventually  # noqa: E402
from memory_group import MemoryGroup, memory_group  # noqa: E402

from ckptfs.flow import prepare  # noqa: E402
from ckptfs.tiers import space  # noqa: E402

MIB = 1 << 20
LIMIT_BYTES = 256 * MIB
WARM_UP_BYTES = 2048 * MIB
WRITE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).resolve().parent)!r})
import suites
from pathlib import Path
print(suites.write_new(Path(sys.argv[1]), size=int(sys.argv[2]), piece=int(sys.argv[3])))
"""
_numbers = itertools.count(time.monotonic_ns())


@contextmanager
def mounts(*, has_nvme: bool, ram: str = "8G") -> Iterator[tuple[list[DaemonUnderTest], MemoryGroup]]:
    """Start both mounts, passthrough first, and make the group."""
    options = {} if has_nvme else {"nvme": None}
    with ExitStack() as stack:
        nodes = [DaemonUnderTest(path, pfs=None, ram=ram, **options) for path in ("passthrough", "buffered")]
        for node in nodes:
            stack.callback(node.close)
            node.start()
        yield nodes, stack.enter_context(memory_group(LIMIT_BYTES))


def measure(nodes: list[DaemonUnderTest], group: MemoryGroup, *, size: int, piece: int, rounds: int) -> list[tuple[float, float]]:
    """Return the speeds in bytes/s of (passthrough, buffered), in turns."""
    pairs = []
    for number in range(rounds):
        found = {node: _once(node, group, size, piece) for node in (nodes if number % 2 else nodes[::-1])}
        pairs.append((found[nodes[0]], found[nodes[1]]))
    return pairs


def _once(node: DaemonUnderTest, group: MemoryGroup, size: int, piece: int) -> float:
    ram = node.state / "ram"
    for place in (ram / "expected").glob("*"):
        place.unlink()
    if node.options["data_path"] == "passthrough" and node.options.get("nvme", "") is None:
        total = space.read_capacity(ram).total
        spares = prepare.choose_changes([], [], total // 2, prepare.count_spares(total)).missing
        eventually(lambda: list_prepared(ram) == list(spares), what="nothing but spare files is prepared")
    warm_up = Path("/dev/shm") / f"ckptfs-bench-{os.getpid()}"
    suites.write_new(warm_up, size=WARM_UP_BYTES, piece=4 * MIB)
    warm_up.unlink()
    path = node.path / suites.name_without_digits(next(_numbers))  # A kind of its own.
    speed = float(group.run(WRITE, path, str(size), str(piece), timeout=300))
    path.unlink()
    node.settle()
    return speed


def list_prepared(ram: Path) -> list[int]:
    """Return the sizes of the prepared files of a RAM tier."""
    return [int(path.name.partition("-")[0], 16) for path in (ram / "prepared").glob("*") if not path.name.startswith("new-")]


def main() -> None:
    """Print the median speeds and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, nargs="+", default=[256, 1024, 3072])
    parser.add_argument("--kib", type=int, nargs="+", default=[4, 64, 1024, 4096])
    parser.add_argument("--ram", default="8G", help="the size of both RAM tiers")
    parser.add_argument("--nvme", action="store_true", help="both mounts have an NVMe tier")
    arguments = parser.parse_args()
    with mounts(has_nvme=arguments.nvme, ram=arguments.ram) as (nodes, group):
        for mib, kib in itertools.product(arguments.mib, arguments.kib):
            pairs = measure(nodes, group, size=mib * MIB, piece=kib << 10, rounds=arguments.rounds)
            ours, theirs = (statistics.median(column) / 1e6 for column in zip(*pairs, strict=True))
            ratio = statistics.median(one / other for one, other in pairs)
            print(
                f"{mib} MiB in {kib} KiB: {ours:.0f} MB/s, buffered {theirs:.0f}, ratio {ratio:.2f}, load {os.getloadavg()[0]:.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
