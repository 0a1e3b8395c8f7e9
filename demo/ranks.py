"""A training job of several ranks with torch.distributed.checkpoint. It does not know about ckptfs.

Parameters and momentum are sharded over the ranks by rows. Every rank gathers them, computes the same gradients and updates its own rows,
so the losses are equal to the last bit for any number of ranks.
Usage: ranks.py DIRECTORY --rank R --ranks N --meet HOST:PORT --steps N [--every K] [--resume]
"""

import argparse
import os
import re

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

WIDTH = 1000
LAYERS = 8
RATE, MOMENTUM = 2.0**-20, 0.875


class Training:
    """A model whose parameters and momentum are sharded by rows."""

    def __init__(self, mesh: DeviceMesh) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())), nn.Linear(WIDTH, 1))
        self.shards = {name: distribute_tensor(value.detach().clone(), mesh, [Shard(0)]) for name, value in self.model.named_parameters()}
        self.momentum = {name: torch.zeros_like(shard) for name, shard in self.shards.items()}
        self.step = torch.zeros(1, dtype=torch.int64)

    def state(self) -> dict[str, object]:
        """Return the content of a checkpoint. Loading fills these tensors in place."""
        return {"parameters": self.shards, "momentum": self.momentum, "step": self.step}

    def train(self) -> float:
        """Do one step; return its loss."""
        for name, parameter in self.model.named_parameters():
            parameter.data = self.shards[name].full_tensor()
        self.step += 1
        inputs = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(int(self.step)))
        loss = (self.model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
        gradients = torch.autograd.grad(loss, list(self.model.parameters()))
        for (name, shard), gradient in zip(self.shards.items(), gradients, strict=True):
            self._update(shard, self.momentum[name], gradient)
        return loss.item()

    def _update(self, shard: DTensor, momentum: DTensor, gradient: torch.Tensor) -> None:
        """Update the own rows. Plain products and sums round the same for any sharding."""
        mesh = shard.device_mesh
        rows = distribute_tensor(gradient, mesh, [Shard(0)]).to_local()
        momentum.to_local().mul_(MOMENTUM).add_(rows)
        shard.to_local().sub_(momentum.to_local() * RATE)


def newest(directory: str) -> str:
    """Return the newest complete checkpoint: the newest with metadata."""
    sets = sorted(os.path.join(directory, name) for name in os.listdir(directory) if re.fullmatch(r"step_\d+", name))
    return next(found for found in reversed(sets) if os.path.exists(os.path.join(found, ".metadata")))


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--meet", required=True)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{arguments.meet}", rank=arguments.rank, world_size=arguments.ranks)
    training = Training(init_device_mesh("cpu", (arguments.ranks,)))
    is_first = arguments.rank == 0
    if arguments.resume:
        found = newest(arguments.directory)
        dcp.load(training.state(), checkpoint_id=found)
        if is_first:
            print(f"{arguments.ranks} ranks resumed from {found}", flush=True)
    while int(training.step) < arguments.steps:
        loss = training.train()
        step = int(training.step)
        if is_first:
            print(f"step {step} loss {loss:.6f} {loss.hex()}", flush=True)
        if step % arguments.every == 0:
            path = os.path.join(arguments.directory, f"step_{step:04d}")
            dcp.save(training.state(), checkpoint_id=path)
            if is_first:
                print(f"saved {path}", flush=True)
    dist.barrier()
    # Gloo's threads can keep the interpreter from ending cleanly.
    os._exit(0)


if __name__ == "__main__":
    main()
