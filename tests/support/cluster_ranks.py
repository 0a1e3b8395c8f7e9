"""A job of several ranks, as a program: it saves and loads with torch.distributed.checkpoint, and knows nothing of the filesystem below.

Usage: cluster_ranks.py DIRECTORY --rank R --ranks N --meet HOST:PORT --steps N [--resume]
Every value of a checkpoint follows from its step, so what is loaded is compared bit for bit. Rank 0 says `saved STEP`, `resumed STEP`, and
`cannot load STEP: WHY` of a set that has its metadata and cannot be read.
"""

import argparse
import os
import re
import shutil
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

ROWS, COLUMNS = 1200, 1000
KEPT = 3


def values(step: int, name: str) -> torch.Tensor:
    """What the tensor of that name holds after a step; the frozen one always the same."""
    seed = 7 if name == "frozen" else 1000 * step + len(name)
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))


def state(step: int, mesh: DeviceMesh) -> dict[str, Any]:
    """All of it: sharded by rows over the ranks, and what every rank has."""
    sharded = {name: distribute_tensor(values(step, name), mesh, [Shard(0)]) for name in ("weights", "momentum", "frozen")}
    return {**sharded, "losses": torch.arange(1000) * step, "step": step, "seen": list(range(step))}


def same(one: Any, other: Any) -> bool:
    """Whether two values are so, bit for bit."""
    if isinstance(one, DTensor):
        return torch.equal(one.to_local(), other.to_local())
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def sets(directory: str) -> list[int]:
    """The steps of which there is a set with its metadata, the newest first."""
    found = [int(name.removeprefix("step_")) for name in os.listdir(directory) if re.fullmatch(r"step_\d+", name)]
    return sorted((step for step in found if is_there(place(directory, step) + "/.metadata")), reverse=True)


def is_there(path: str) -> bool:
    """Whether there is such a file. Raises any other error."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    return True


def place(directory: str, step: int) -> str:
    return os.path.join(directory, f"step_{step:04d}")


def resume(directory: str, mesh: DeviceMesh, say: Any) -> int:
    """Load the newest set that can be loaded; its step. All ranks try the same ones."""
    told: list[Any] = [sets(directory)]
    say(f"sees {sorted(os.listdir(directory))}, whole are {told[0]}")
    dist.broadcast_object_list(told)
    for step in told[0]:
        found = state(0, mesh)
        try:
            dcp.load(found, checkpoint_id=place(directory, step))
        except (Exception, CheckpointException) as failure:
            say(f"cannot load {step}: {str(failure)[-300:]!r}")
            continue
        expected = state(step, mesh)
        wrong = [name for name in expected if not same(found[name], expected[name])]
        if wrong:
            print(f"WRONG {step}: {wrong}", flush=True)
            os._exit(3)
        return int(step)
    return 0


def save(directory: str, step: int, mesh: DeviceMesh) -> None:
    if step % 3 == 0:
        dcp.async_save(state(step, mesh), checkpoint_id=place(directory, step)).result()
    else:
        dcp.save(state(step, mesh), checkpoint_id=place(directory, step))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--meet", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()

    def say(what: str) -> None:
        if arguments.rank == 0:
            print(what, flush=True)

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{arguments.meet}", rank=arguments.rank, world_size=arguments.ranks)
    mesh = init_device_mesh("cpu", (arguments.ranks,))
    step = resume(arguments.directory, mesh, say) if arguments.resume else 0
    say(f"resumed {step}")
    last = step + arguments.steps
    while step < last:
        step += 1
        # What a job that was lost left of this step is no checkpoint.
        if arguments.rank == 0:
            shutil.rmtree(place(arguments.directory, step), ignore_errors=True)
        dist.barrier()
        save(arguments.directory, step, mesh)
        say(f"saved {step}")
        if arguments.rank == 0:
            for old in sets(arguments.directory)[KEPT:]:
                shutil.rmtree(place(arguments.directory, old))
    dist.barrier()
    say("ended")
    sys.stdout.flush()
    # Gloo's threads do not always let the interpreter end in order.
    os._exit(0)


if __name__ == "__main__":
    main()
