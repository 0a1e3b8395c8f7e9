"""Record what real programs do in a directory of checkpoints, for tests that replay it. Needs strace, and the program; run by hand.

    python record.py transformers|lightning|deepspeed|orbax|tensorflow

Writes `<name>.json` beside this file: versions of the packages, and the events in their order. An event is ["mkdir", path],
["write", path, bytes] (a file was closed; the bytes are base85 of zlib), ["rename", path, path] or ["remove", path].
Install the packages into an environment of their own, such as: pip install torch==2.13.0 transformers accelerate lightning deepspeed.
"""

import base64
import json
import os
import re
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from importlib import metadata
from pathlib import Path

TRANSFORMERS = """
import os, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
data = [{"input_ids": torch.arange(8) % 16, "labels": torch.arange(8) % 16}] * 32
sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=16)
model = LlamaForCausalLM(LlamaConfig(**sizes))
save = model.save_pretrained
model.save_pretrained = lambda *args, **more: save(*args, **{**more, "max_shard_size": "2KB"})
arguments = TrainingArguments(sys.argv[1], max_steps=4, save_steps=2, per_device_train_batch_size=1, report_to=[],
                              use_cpu=True, disable_tqdm=True, logging_strategy="no")
Trainer(model=model, args=arguments, train_dataset=data).train()
"""
LIGHTNING = """
import sys
import lightning, torch
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
    def training_step(self, batch, number):
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
def train(**more):
    keep = lightning.pytorch.callbacks.ModelCheckpoint(sys.argv[1], every_n_train_steps=2, save_top_k=-1, save_last=True)
    trainer = lightning.Trainer(callbacks=[keep], logger=False, accelerator="cpu", enable_progress_bar=False, **more)
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(4, 2)))
train(max_steps=4)
train(max_steps=4)
"""
DEEPSPEED = """
import os, sys
os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed, torch
deepspeed.init_distributed("gloo")
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.1, "torch_adam": True}},
          "zero_optimization": {"stage": int(sys.argv[2])}, "zero_allow_untested_optimizer": True}
model = torch.nn.Linear(4, 4)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for step in range(2):
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    engine.save_checkpoint(sys.argv[1])
"""
ORBAX = """
import sys
import jax.numpy as jnp
import orbax.checkpoint as ocp
manager = ocp.CheckpointManager(sys.argv[1], options=ocp.CheckpointManagerOptions(max_to_keep=2))
for step in (100, 200, 300):
    manager.save(step, args=ocp.args.StandardSave({"w": jnp.arange(8.0), "step": step}))
manager.wait_until_finished()
"""
TENSORFLOW = """
import sys
import tensorflow as tf
manager = tf.train.CheckpointManager(tf.train.Checkpoint(w=tf.Variable(tf.range(8))), sys.argv[1], max_to_keep=2)
for _ in range(3):
    manager.save()
"""
RANKS = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
WRITERS: dict[str, tuple[list[str], str, list[str], tuple[str, ...]]] = {
    "transformers": ([sys.executable], TRANSFORMERS, [], ("transformers", "torch")),
    "transformers-2-ranks": (RANKS, TRANSFORMERS, [], ("transformers", "torch")),
    "lightning": ([sys.executable], LIGHTNING, [], ("lightning", "torch")),
    "deepspeed-zero-1": (RANKS, DEEPSPEED, ["1"], ("deepspeed", "torch")),
    "deepspeed-zero-3": (RANKS, DEEPSPEED, ["3"], ("deepspeed", "torch")),
    "orbax": ([sys.executable], ORBAX, [], ("orbax-checkpoint", "jax")),
    "tensorflow": ([sys.executable], TENSORFLOW, [], ("tensorflow-cpu",)),
}
CALLS = "openat,open,creat,close,mkdir,mkdirat,rename,renameat,renameat2,unlink,unlinkat,rmdir"
DELAY = "rename,renameat,renameat2,unlink,unlinkat,rmdir:delay_enter=30000"
"""Before a file moves or goes, there is time to read it."""
_LINE = re.compile(r"(\d+) +(?:<\.\.\. \w+ resumed>)?(.*)")
_AT = r"(?:(?:AT_FDCWD|\d+)(?:<(.*?)>)?, )?"
_OPENED = re.compile(r"(?:openat|open|creat)\(.*(?:O_WRONLY|O_RDWR|O_CREAT|creat).*\) += \d+<(.*)>")
_CLOSED = re.compile(r"close\(\d+<(.*)>\) += 0")
_MADE = re.compile(rf'mkdir(?:at)?\({_AT}"(.*?)".*\) += 0')
_RENAMED = re.compile(rf'rename(?:at2?)?\({_AT}"(.*?)", {_AT}"(.*?)".*\) += 0')
_REMOVED = re.compile(rf'(?:unlink|rmdir|unlinkat)\({_AT}"(.*?)".*\) += 0')


class Recorder:
    """Turns lines of strace into events below a directory."""

    def __init__(self, top: str) -> None:
        self.events: list[list[str]] = []
        self._top, self._pending, self._written = top, dict[str, str](), Counter[str]()

    def read_line(self, line: str) -> None:
        found = _LINE.match(line)
        assert found, line
        process, call = found[1], self._pending.pop(found[1], "") + found[2]
        if call.endswith("<unfinished ...>"):
            self._pending[process] = call.removesuffix("<unfinished ...>").rstrip()
        elif opened := _OPENED.match(call):
            self._written[opened[1]] += 1
        elif (closed := _CLOSED.match(call)) and self._written[closed[1]] and self._is_inside(closed[1]):
            data = Path(closed[1]).read_bytes()
            self._written[closed[1]] -= 1
            self._add("write", closed[1], data=base64.b85encode(zlib.compress(data, 9)).decode())
        elif made := _MADE.match(call):
            self._add("mkdir", os.path.join(made[1] or "", made[2]))
        elif renamed := _RENAMED.match(call):
            old, new = os.path.join(renamed[1] or "", renamed[2]), os.path.join(renamed[3] or "", renamed[4])
            self._written[new] += self._written.pop(old, 0)
            self._add("rename", old, new)
        elif removed := _REMOVED.match(call):
            self._add("remove", os.path.join(removed[1] or "", removed[2]))

    def _is_inside(self, path: str) -> bool:
        return path.startswith(self._top + "/")

    def _add(self, what: str, *paths: str, data: str = "") -> None:
        if any(map(self._is_inside, paths)):
            self.events.append([what, *(path.removeprefix(self._top + "/") for path in paths), *([data] if data else [])])


def record(name: str) -> None:
    """Run a writer and write its events."""
    launch, code, arguments, packages = WRITERS[name]
    # On another filesystem than /tmp, as ckptfs is: some programs write there first.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        script, pipe, top = Path(place, "writer.py"), Path(place, "pipe"), Path(place, "out")
        script.write_text(code)
        os.mkfifo(pipe)
        top.mkdir()
        trace = [
            "strace",
            "-f",
            "-y",
            "-qq",
            "-s",
            "4096",
            "-o",
            str(pipe),
            "-e",
            f"trace={CALLS}",
            "-e",
            f"inject={DELAY}",
            "-e",
            "signal=none",
        ]
        process = subprocess.Popen([*trace, *launch, str(script), str(top), *arguments], stdin=subprocess.DEVNULL, cwd=place)
        recorder = Recorder(str(top))
        with open(pipe, errors="surrogateescape") as lines:
            for line in lines:
                recorder.read_line(line.rstrip("\n"))
        assert process.wait() == 0
    versions = {package: metadata.version(package) for package in packages}
    text = ",\n".join(json.dumps(event) for event in recorder.events)
    Path(__file__).with_name(f"{name}.json").write_text(f'{{"versions": {json.dumps(versions)},\n"events": [\n{text}\n]}}\n')


if __name__ == "__main__":
    for one in sys.argv[1:]:
        record(one)
