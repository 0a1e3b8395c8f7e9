"""What storing unchanged blocks once saves, and what it costs: ten sets of which a tenth changes, with and without, in turns.

Usage: stored_once.py [--rounds N] [--blocks N] [--kinds xfs,btrfs,ext4] [--images DIRECTORY]. Needs root and loop devices. The filesystems
lie in files in DIRECTORY (/dev/shm). One node writes each set to NVMe and seals it, while the share step runs in a thread as in the mover;
then it sends the set to a peer, whose NVMe is on the same filesystem. Another node writes the same sets back to a PFS. All figures are
medians. `without` leaves out what shares blocks; on ext4 both must be the same.
"""

import argparse
import contextlib
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / part) for part in ("tests/support", ".", "daemon", "client")]

from clique_world import LocalCluster, Node, offer_of  # noqa: E402 - the tests' nodes are found by the line above
from loop_disk import mounted  # noqa: E402
from write_back_world import Mount  # noqa: E402

from ckptfs import disk, limits  # noqa: E402
from ckptfs.flow.share_blocks import ShareBlocks  # noqa: E402
from ckptfs.model import Tier  # noqa: E402
from ckptfs.tiers import reflink  # noqa: E402

SETS = 10
IMAGE_BYTES = 6 << 30
MIB = 1 << 20
Figures = tuple[float, ...]
COLUMNS = ("written s", "sealed s", "moved MiB", "stored MiB", "written back s", "stored on PFS MiB")


def main() -> None:
    """Measure and print one line for each filesystem and way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=20, help="blocks of 4 MiB in a set")
    parser.add_argument("--kinds", default="xfs,btrfs,ext4")
    parser.add_argument("--images", type=Path, default=Path("/dev/shm"))
    arguments = parser.parse_args()
    print(f"{SETS} sets of {arguments.blocks * limits.BLOCK_BYTES // MIB} MiB, of which a tenth changes; {arguments.rounds} rounds")
    print(f"{'':16}" + "".join(f"{column:>20}" for column in COLUMNS))
    for kind in arguments.kinds.split(","):
        figures: dict[bool, list[Figures]] = {True: [], False: []}
        for number in range(arguments.rounds):
            for shares in (True, False) if number % 2 else (False, True):
                with tempfile.TemporaryDirectory(prefix="ckptfs-bench-", dir=arguments.images) as directory:
                    figures[shares].append(in_process(measure, kind, Path(directory), arguments.blocks, number, shares))
        for shares, name in ((False, "without"), (True, "with")):
            medians = [statistics.median(column) for column in zip(*figures[shares], strict=True)]
            print(f"{kind + ' ' + name:16}" + "".join(f"{value:20.2f}" for value in medians), flush=True)


def in_process(call: Callable[..., Figures], *values: Any) -> Figures:
    """Call a function in a process of its own: what it keeps open would keep its filesystems mounted."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(call, values)


def make_sets(blocks: int, seed: int) -> list[bytes]:
    """Return the bytes of the sets. Each changes other blocks than the one before."""
    changed = max(1, blocks // 10)
    data = bytearray(os.urandom(blocks * limits.BLOCK_BYTES))
    found = [bytes(data)]
    for number in range(1, SETS):
        for block in range(changed):
            start = (seed + number * changed + block) % blocks * limits.BLOCK_BYTES
            data[start : start + limits.BLOCK_BYTES] = os.urandom(limits.BLOCK_BYTES)
        found.append(bytes(data))
    return found


def measure(kind: str, directory: Path, blocks: int, seed: int, shares: bool) -> Figures:
    sets = make_sets(blocks, seed)
    with contextlib.nullcontext() if shares else without_sharing():
        with mounted(kind, directory, IMAGE_BYTES) as place:
            local = measure_nvme(place, sets)
        with mounted_again(kind, directory) as place:
            return *local, *measure_pfs(place, directory / "mount", sets)


@contextlib.contextmanager
def mounted_again(kind: str, directory: Path) -> Iterator[Path]:
    (directory / "second").mkdir()
    with mounted(kind, directory / "second", IMAGE_BYTES) as place:
        yield place


@contextlib.contextmanager
def without_sharing() -> Iterator[None]:
    """Let every filesystem be one that cannot."""
    refused = mock.Mock(return_value=False)
    with mock.patch.multiple(reflink, is_possible=refused, try_clone_range=refused):
        yield


def measure_nvme(place: Path, sets: list[bytes]) -> tuple[float, float, float, float]:
    """Return the seconds of writes and of seals of a set, MiB that moved to the peer, and MiB that the filesystem stores for both."""
    cluster = LocalCluster(place / "nodes", 2, nvme=True)
    one, other = cluster.nodes
    other.squeeze(Tier.RAM, MIB)
    other.renew_host()
    before = get_used_bytes(place)
    writes, seals, moved = [], [], 0
    with sharing_beside(one, other) as rest:
        for number, data in enumerate(sets):
            began_s = time.monotonic()
            content = one.make(b"step_%d.pt" % number, data, tier=Tier.NVME)
            written_s = time.monotonic()
            one.seal()
            sealed_s = time.monotonic()
            writes.append(written_s - began_s)
            seals.append(sealed_s - written_s)
            one.publish_shared(content)
            with disk.closing(one.tiers[Tier.NVME].open(content)) as fd:
                moved += one.peers.send(other.member, offer_of(one, content), fd).bytes_moved
        rest()
    stored = get_used_bytes(place) - before
    check(one, other, sets)
    return statistics.median(writes), statistics.median(seals), moved / MIB, stored / MIB


def check(one: Node, other: Node, sets: list[bytes]) -> None:
    """Compare what both nodes hold with what was written."""
    contents = sorted(one.files(Tier.NVME))
    assert [one.data(content, Tier.NVME) == data for content, data in zip(contents, sets, strict=True)] == [True] * len(sets)
    assert [other.data(content, Tier.NVME) == data for content, data in zip(contents, sets, strict=True)] == [True] * len(sets)


@contextlib.contextmanager
def sharing_beside(*nodes: Node) -> Iterator[Callable[[], None]]:
    """Run the share step of each node in a thread. Yield a function that waits until it has nothing left to do."""
    is_last = threading.Event()

    def run(share: ShareBlocks) -> None:
        while True:
            was_last = is_last.is_set()
            share.step()
            if was_last and not share.is_pending:
                return
            time.sleep(min(share.next_due_s() or 0.02, 0.02))

    threads = [threading.Thread(target=run, args=(ShareBlocks(node.db, node.tiers),)) for node in nodes]
    for thread in threads:
        thread.start()

    def rest() -> None:
        is_last.set()
        for thread in threads:
            thread.join()

    try:
        yield rest
    finally:
        rest()


def measure_pfs(place: Path, directory: Path, sets: list[bytes]) -> tuple[float, float]:
    """Return the seconds until a set is on the PFS, and MiB that the PFS stores."""
    mount = Mount(directory)
    mount.pfs = place / "pfs"
    mount.pfs.mkdir()
    mount.configure(pfs=mount.pfs, ram_bytes=2 * len(sets) * len(sets[0]))
    _ = mount.tiers[Tier.PFS].uuid
    before, flow, seconds = get_used_bytes(place), mount.write_back(), []
    for number, data in enumerate(sets):
        mount.put(b"step_%d.pt" % number, data)
        began_s = time.monotonic()
        mount.settle(flow)
        seconds.append(time.monotonic() - began_s)
    stored = get_used_bytes(place) - before
    assert all((mount.pfs / f"step_{number}.pt").read_bytes() == data for number, data in enumerate(sets))
    shutil.rmtree(directory)
    return statistics.median(seconds), stored / MIB


def get_used_bytes(place: Path) -> int:
    subprocess.run(["sync", "-f", place], check=True)
    found = os.statvfs(place)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


if __name__ == "__main__":
    main()
