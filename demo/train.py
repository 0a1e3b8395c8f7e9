"""A plain PyTorch training script with torch.save and torch.load. It does not know about ckptfs.

Usage: train.py DIRECTORY --steps N [--every K] [--resume]. Prints one line per step, with the loss also as an exact hexadecimal number.
"""

import argparse
import os
import re

import torch
from torch import nn

WIDTH = 1024


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer, always with the same initial values."""
    torch.manual_seed(1)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())), nn.Linear(WIDTH, 1))
    return model, torch.optim.Adam(model.parameters(), lr=1e-4)


def save(directory: str, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save a checkpoint under a temporary name, then rename it."""
    final = os.path.join(directory, f"step_{step:04d}.pt")
    print(f"saving {final}", flush=True)
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    torch.save(state, final + ".tmp")
    os.rename(final + ".tmp", final)
    print(f"saved {final}", flush=True)


def load_newest(directory: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint; return its step."""
    newest = max(name for name in os.listdir(directory) if re.fullmatch(r"step_\d+\.pt", name))
    state = torch.load(os.path.join(directory, newest))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    print(f"resumed from {newest}", flush=True)
    return int(state["step"])


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, optimizer = build()
    first = load_newest(arguments.directory, model, optimizer) if arguments.resume else 0
    for step in range(first + 1, arguments.steps + 1):
        inputs = torch.randn(32, WIDTH)
        loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.6f} {loss.item().hex()}", flush=True)
        if step % arguments.every == 0:
            save(arguments.directory, step, model, optimizer)


if __name__ == "__main__":
    main()
