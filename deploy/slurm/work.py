"""A stand-in for the program of a job: it computes in steps, saves every second one, and continues from what it saved.

`work.py DIR [--resume FILE] [--steps N] [--limit N] [--pause SECONDS]` ends after N steps in all, or after so many in this run. A pause
stands for longer steps. SIGUSR1: save and end now. After all steps DIR/result has a number that depends on each of them.
"""

import argparse
import os
import pickle
import signal
import time
from types import FrameType

VALUES = 60_000
EVERY = 2
is_ending = False


def end(number: int, frame: FrameType | None) -> None:
    global is_ending
    is_ending = True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--resume", metavar="FILE")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--pause", type=float, default=0.0)
    asked = parser.parse_args()
    signal.signal(signal.SIGUSR1, end)
    step, values = 0, [1.0 / (1 + number) for number in range(VALUES)]
    if asked.resume:
        with open(asked.resume, "rb") as file:
            step, values = pickle.load(file)
    print(f"begins at step {step} on {os.environ.get('SLURMD_NODENAME', 'this machine')}", flush=True)
    last = asked.steps if asked.limit is None else min(asked.steps, step + asked.limit)
    while step < last and not is_ending:
        step += 1
        time.sleep(asked.pause)
        values = [3.7 * value * (1.0 - value) for value in values]
        if step % EVERY == 0 or step == last or is_ending:
            # Each checkpoint has a name of its own, so that the one before it stays whole.
            with open(os.path.join(asked.directory, f"step_{step:06d}.pkl"), "wb") as file:
                pickle.dump((step, values), file)
            print(f"saved step {step}", flush=True)
    if step == asked.steps:
        with open(os.path.join(asked.directory, "result"), "w") as file:
            file.write(f"{step} {sum(values).hex()}\n")


if __name__ == "__main__":
    main()
