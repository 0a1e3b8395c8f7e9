"""Directories that real programs wrote, judged whole, and with their writer killed anywhere: N2, N7, D6, T6, T7, H4."""

import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from programs import MELT, PROGRAM_S, need, run
from series_tree import SeriesTree, TreeFile, prefixes

from ckptfs.series.patterns import list_series

pytestmark = pytest.mark.apps

DCP = """
import os, sys, tempfile
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp


def save(rank, world, meeting, paths):
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    for number, path in enumerate(paths):
        state = {"shared": torch.full((1000,), float(number)), f"of{rank}": torch.full((3000,), rank + 0.5), "step": number}
        if number % 2:
            dcp.async_save(state, checkpoint_id=path).result()
        else:
            dcp.save(state, checkpoint_id=path)
    dist.destroy_process_group()


if __name__ == "__main__":
    world, meeting = int(sys.argv[1]), os.path.join(tempfile.mkdtemp(dir="."), "meeting")
    mp.start_processes(save, args=(world, os.path.abspath(meeting), sys.argv[2:]), nprocs=world, start_method="spawn")
"""


def save_dcp(directory: Path, world: int, *names: str) -> SeriesTree:
    """Have ranks save sets below a directory, one after the other, every second one asynchronously."""
    directory.mkdir(exist_ok=True)
    (directory.parent / "dcp.py").write_text(DCP)
    command = [sys.executable, str(directory.parent / "dcp.py"), str(world), *(str(directory / name) for name in names)]
    subprocess.run(command, check=True, timeout=PROGRAM_S, capture_output=True, cwd=directory.parent)
    return SeriesTree.of_directory(directory)


@pytest.mark.usefixtures("torch")
def test_distributed_checkpoints(tmp_path: Path) -> None:
    """T6, T7: two ranks; any file missing or cut, an old `.metadata` over new shards, and then a save on one rank only."""
    saved = tmp_path / "saved"
    tree = save_dcp(saved, 2, "step_1", "step_2", "later")
    assert tree.find("step_*") == "step_2" and tree.find_reasons("step_*") == {}
    files = [path for path in tree.files if path.startswith(b"step_2/")]
    assert len(files) == 3
    for path in files:
        assert tree.without(path.decode()).find("step_*") == "step_1"
        data = tree.files[path].data
        for length in random.Random(1).sample(range(len(data)), 40):
            assert tree.with_files({path.decode(): TreeFile(data[:length], tree.files[path].mtime_ns)}).find("step_*") == "step_1", path
    later = {path.decode().replace("later", "step_2"): file for path, file in tree.files.items() if path.startswith(b"later/__")}
    again = tree.with_files(later)
    assert len(later) == 2 and again.find("step_*") == "step_1" and "belongs to the save before" in again.find_reasons("step_*")["step_2"]
    assert save_dcp(saved, 1, "step_3").find("step_*") == "step_3", "fewer ranks after a restart"


def test_single_files_of_torch(tmp_path: Path, torch: Any) -> None:
    """N7: as `torch.save` writes, today and before 1.6, cut wherever its writer may be killed."""
    for number in (100, 200):
        state = {"model": torch.nn.Linear(40, 40).state_dict(), "step": number, "rng": torch.get_rng_state()}
        torch.save(state, tmp_path / f"step_{number}.pt")
        torch.save(state, tmp_path / f"legacy_{number}.pth", _use_new_zipfile_serialization=False)
        torch.save(state, tmp_path / f"epoch=1-step={number}.ckpt")
    tree = SeriesTree.of_directory(tmp_path)
    for pattern in ("step_*.pt", "legacy_*.pth", "epoch=*-step=*.ckpt"):
        first, second = pattern.replace("h=*", "h=1").replace("*", "100"), pattern.replace("h=*", "h=1").replace("*", "200")
        assert tree.find(pattern) == second
        data = tree.files[second.encode()].data
        for length in prefixes(data, 300):
            assert tree.with_files({second: data[:length]}).find(pattern) == first, f"{second} cut after {length} of {len(data)} bytes"


def test_shards_of_safetensors(tmp_path: Path, torch: Any) -> None:
    """D6: as Hugging Face lays them out: numbered shards, then the index, then the state of the trainer."""
    safetensors = pytest.importorskip("safetensors.torch")
    for number in (500, 1000):
        directory = tmp_path / f"checkpoint-{number}"
        directory.mkdir()
        weight_map = {}
        for shard in range(1, 5):
            name = f"model-{shard:05}-of-00004.safetensors"
            safetensors.save_file({f"w{shard}": torch.full((300,), float(shard))}, directory / name)
            weight_map[f"w{shard}"] = name
        (directory / "model.safetensors.index.json").write_text(f'{{"weight_map": {str(weight_map)!s}}}'.replace("'", '"'))
        torch.save({"state": {}}, directory / "optimizer.pt")
        (directory / "trainer_state.json").write_text('{"global_step": 1}')
    tree = SeriesTree.of_directory(tmp_path)
    assert tree.find("checkpoint-*") == "checkpoint-1000"
    for shard in range(1, 5):
        path = f"checkpoint-1000/model-{shard:05}-of-00004.safetensors"
        assert tree.without(path).find("checkpoint-*") == "checkpoint-500"
        data = tree.files[path.encode()].data
        for length in prefixes(data, 100):
            assert tree.with_files({path: data[:length]}).find("checkpoint-*") == "checkpoint-500"
    assert tree.without("checkpoint-1000/trainer_state.json").find("checkpoint-*") == "checkpoint-500"


def test_hdf5_and_numpy(tmp_path: Path) -> None:
    """H4."""
    h5py, numpy = pytest.importorskip("h5py"), pytest.importorskip("numpy")
    for number in (1, 2):
        with h5py.File(tmp_path / f"restart_{number}.h5", "w") as file:
            file["x"] = numpy.arange(2000 // number)
        numpy.savez(tmp_path / f"state_{number}.npz", x=numpy.arange(1000 // number))
    tree = SeriesTree.of_directory(tmp_path)
    for pattern in ("restart_*.h5", "state_*.npz"):
        first, second = pattern.replace("*", "1"), pattern.replace("*", "2")
        assert tree.find(pattern) == second, "smaller, but whole"
        data = tree.files[second.encode()].data
        for length in prefixes(data, 200):
            assert tree.with_files({second: data[:length]}).find(pattern) == first


def test_restart_files_of_each_process_of_lammps(tmp_path: Path) -> None:
    """H4, D6: two processes where MPI is there, else one; any file missing or cut."""
    need("lmp")
    (tmp_path / "in.melt").write_text(f"{MELT}restart 100 melt.%.*\nrun 200\n")
    two = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"] if shutil.which("mpirun") else []
    run(*two, "lmp", "-in", "in.melt", cwd=tmp_path, env={"OMP_NUM_THREADS": "1"})
    tree = SeriesTree.of_directory(tmp_path)
    assert b"melt.%.*" in [one.name for one in list_series(tree.siblings)]
    assert tree.find("melt.%.*") == "melt.%.200" and tree.find_reasons("melt.%.*") == {}
    for path in [path.decode() for path in tree.files if path.endswith(b".200")]:
        assert tree.without(path).find("melt.%.*") == "melt.%.100"
        data = tree.files[path.encode()].data
        for length in prefixes(data, 100):
            assert tree.with_files({path: data[:length]}).find("melt.%.*") == "melt.%.100", path
