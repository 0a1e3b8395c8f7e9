"""A training job of several ranks that knows torch.distributed and its checkpoints, and nothing of the filesystem below it.

Parameters and momentum are sharded over the ranks by rows; every rank gathers them, computes the same gradients and updates its own rows,
so that the losses are the same to the last bit for any number of ranks. Checkpoints are those of torch.distributed.checkpoint.
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
    """A model whose parameters and momentum lie in rows on all ranks."""

    def __init__(self, mesh: DeviceMesh) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())), nn.Linear(WIDTH, 1))
        self.shards = {name: distribute_tensor(value.detach().clone(), mesh, [Shard(0)]) for name, value in self.model.named_parameters()}
        self.momentum = {name: torch.zeros_like(shard) for name, shard in self.shards.items()}
        self.step = torch.zeros(1, dtype=torch.int64)

    def state(self) -> dict[str, object]:
        """What a checkpoint holds. Loading fills these tensors."""
        return {"parameters": self.shards, "momentum": self.momentum, "step": self.step}

    def train(self) -> float:
        """One step; its loss."""
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
        """Plain multiplications and additions: their rounding does not depend on where the rows were cut."""
        mesh = shard.device_mesh
        rows = distribute_tensor(gradient, mesh, [Shard(0)]).to_local()
        momentum.to_local().mul_(MOMENTUM).add_(rows)
        shard.to_local().sub_(momentum.to_local() * RATE)


def newest(directory: str) -> str:
    """The newest checkpoint that is whole: the one whose metadata were written."""
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
    talks = arguments.rank == 0
    if arguments.resume:
        found = newest(arguments.directory)
        dcp.load(training.state(), checkpoint_id=found)
        if talks:
            print(f"{arguments.ranks} ranks resumed from {found}", flush=True)
    while int(training.step) < arguments.steps:
        loss = training.train()
        step = int(training.step)
        if talks:
            print(f"step {step} loss {loss:.6f} {loss.hex()}", flush=True)
        if step % arguments.every == 0:
            path = os.path.join(arguments.directory, f"step_{step:04d}")
            dcp.save(training.state(), checkpoint_id=path)
            if talks:
                print(f"saved {path}", flush=True)
    dist.barrier()
    # Gloo's threads do not always let the interpreter end in order.
    os._exit(0)


if __name__ == "__main__":
    main()
