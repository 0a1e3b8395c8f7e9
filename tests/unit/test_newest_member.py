"""The newest complete member of a series, never a wrong one: N2, N7, D3, D6, T6, H1, H4. Layouts by hand; the rules are pure.

`tests/apps/test_checkpoint_writers.py` tries the same rules on what real programs write.
"""

import errno
import functools
import io
import itertools
import json
import os
import pickle
import re
import zipfile
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from series_tree import HISTORY, OLD_NS, SeriesTree, TreeFile

from ckptfs.lifecycle import CliqueCopies, FileRecord
from ckptfs.model import Content, ContentState, Copy, CopyState, Level, PublishedRow, SeriesRule, Tier
from ckptfs.series import patterns, rules, set_kinds
from ckptfs.series.completeness import Completeness, MemberFacts, find_incomplete_reason, judge
from ckptfs.series.patterns import Series
from ckptfs.series.search import KnownSet, KnownSets, LatestAnswer, LatestMember, Listing, SearchResult
from ckptfs.series.set_kinds import DirectoryFacts, MemberFile

DIGEST = b"d"
X = b"x" * 100
TABLE = b"x" * 92 + bytes.fromhex("57fb808b247547db")
"""As the index of TensorFlow ends."""
NEWER = OLD_NS + 1


def archive(size: int = 100) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as found:
        found.writestr("data", bytes(size))
    return file.getvalue()


def safetensors(size: int = 40) -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


def metadata(*shards: str, size: int = 100) -> bytes:
    """A pickle with what `.metadata` says of its shards."""
    return pickle.dumps([{"relative_path": shard, "offset": 0, "length": size} for shard in shards], protocol=4)


def weights(*files: str) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": {f"w{number}": file for number, file in enumerate(files)}}).encode()


def zero_model(data_ranks: int, model_ranks: int = 1) -> bytes:
    """A `mp_rank_00_model_states.pt` of DeepSpeed with ZeRO 1."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as found:
        settings = {"zero_optimization": {"stage": 1}}
        state = {"dp_world_size": data_ranks, "mp_world_size": model_ranks, "ds_config": settings}
        found.writestr("archive/data.pkl", pickle.dumps(state, protocol=2))
    return file.getvalue()


def below(directory: str, files: Mapping[str, bytes | TreeFile]) -> dict[str, bytes | TreeFile]:
    return {f"{directory}/{name}": data for name, data in files.items()}


PARTS = [f"model-{number:05}-of-00004.safetensors" for number in range(1, 5)]
RANKS = [f"zero_pp_rank_{number}_mp_rank_00_optim_states.pt" for number in range(4)]
# A complete member of each kind. The marks of the first group tell that nothing is missing; the others must be compared.
MARKED: dict[str, dict[str, bytes | TreeFile]] = {
    "DCP": {"__0_0.distcp": X, "__1_0.distcp": X, ".metadata": TreeFile(metadata("__0_0.distcp", "__1_0.distcp"), NEWER)},
    "HF Trainer": {
        **{part: safetensors() for part in PARTS}, "model.safetensors.index.json": weights(*PARTS), "config.json": b"{}",
        "training_args.bin": archive(), "optimizer.pt": archive(), "scheduler.pt": archive(), "rng_state.pth": archive(),
        "trainer_state.json": b'{"global_step": 100}',
    },
    "Orbax": {"_CHECKPOINT_METADATA": b'{"commit_timestamp_nsecs": 17}', "state/w/.zarray": b"{}", "state/w/0.0": X},
    "verl": {f"model_world_size_4_rank_{number}.pt": archive() for number in range(4)},
    "parts": {f"shard-{number:05}-of-00003.bin": X for number in range(3)},
    "index": {**{part: safetensors() for part in PARTS[:2]}, "model.safetensors.index.json": weights(*PARTS[:2])},
    "Lightning FSDP": {
        "__0_0.distcp": X, "__1_0.distcp": X, ".metadata": TreeFile(metadata("__0_0.distcp", "__1_0.distcp"), NEWER), "meta.pt": archive(),
    },
    "ZeRO of 2 x 2 ranks": {
        **{f"mp_rank_{model:02}_model_states.pt": zero_model(2, 2) for model in range(2)},
        **{f"bf16_zero_pp_rank_{data}_mp_rank_{model:02}_optim_states.pt": archive() for data in range(2) for model in range(2)},
    },
    "ZeRO with a pipeline": {
        "mp_rank_00_model_states.pt": zero_model(1), "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt": archive(),
        **{f"layer_{layer:02}-model_00-model_states.pt": archive() for layer in range(3)},
    },
    "TensorFlow": {"ckpt.index": TABLE, "ckpt.data-00000-of-00002": X, "ckpt.data-00001-of-00002": X},
}  # fmt: skip
MARKED["index"] = {name.replace("00004", "00002"): data for name, data in MARKED["index"].items()}
MARKED["index"]["model.safetensors.index.json"] = weights(*(part.replace("00004", "00002") for part in PARTS[:2]))
OPEN: dict[str, dict[str, bytes | TreeFile]] = {
    "DeepSpeed": {"mp_rank_00_model_states.pt": X, **dict.fromkeys(RANKS, X)},
    "ranks": {"rank0.pt": X, "rank1.pt": X},
    "ranks in directories": {"mp_rank_00/model.pt": archive(), "mp_rank_01/model.pt": archive()},
    "three files": {"model.bin": X, "optimizer.bin": X, "scheduler.bin": X},
    "formats that show their end": {"model.safetensors": safetensors(), "optimizer.pt": archive(), "notes.txt": b"n"},
    "Orbax with a mark": {"state/d/abc": X, "metadata": X, "commit_success.txt": b"Checkpoint commit was successful"},
}


LAST_WRITTEN = {".metadata", "trainer_state.json", "_CHECKPOINT_METADATA", "commit_success.txt", "ckpt.index"}


def series_of(files: Mapping[str, bytes | TreeFile], *numbers: int) -> SeriesTree:
    return SeriesTree.of({path: data for number in numbers for path, data in below(f"step_{number}", files).items()})


# --- sets ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*MARKED, *OPEN])
def test_a_set_is_found(kind: str) -> None:
    """N2: as the only member, and as the newer of two."""
    files = MARKED.get(kind) or OPEN[kind]
    assert series_of(files, 100).find("step_*") == "step_100"
    tree = series_of(files, 100, 200)
    assert tree.find("step_*") == "step_200" and tree.search("step_*").rejected == []


@pytest.mark.parametrize("kind", [*MARKED, *OPEN])
def test_a_set_that_lacks_any_one_file_is_not(kind: str) -> None:
    """N7, D6, T6: whichever it is."""
    files = MARKED.get(kind) or OPEN[kind]
    for name in files:
        left = {other: data for other, data in files.items() if other != name}
        tree = series_of(files, 100).with_files(below("step_200", left))
        if kind.startswith("Orbax") and name.startswith(("state", "metadata")):
            continue  # Orbax writes the time of the commit, or that mark, last.
        assert tree.find("step_*") == "step_100", name
        assert list(tree.find_reasons("step_*")) == ["step_200"], name


@pytest.mark.parametrize("parts", ["{}_world_size_2_rank_{}.pt", "{}-0000{}-of-00002.bin"])
def test_a_sort_of_files_that_is_not_begun(parts: str) -> None:
    """N7, D6: the counts in the names of a model tell nothing of the optimizer, which the members before have."""
    model, optimizer = ({parts.format(sort, number): archive() for number in (0, 1)} for sort in ("model", "optim"))
    tree = series_of(model | optimizer, 100).with_files(below("step_200", model))
    assert tree.find("step_*") == "step_100"
    assert tree.find_reasons("step_*") == {"step_200": f"{min(optimizer)} is missing, which step_100 has"}


def test_the_mark_that_orbax_writes_last() -> None:
    """D6: on stores without an atomic rename."""
    files = OPEN["Orbax with a mark"]
    assert series_of(files, 100, 200).without("step_200/commit_success.txt").find("step_*") == "step_100"
    arrays = {
        "_CHECKPOINT_METADATA": b'{"item_handlers": {"default": "S", "metadata": "J"}, "commit_timestamp_nsecs": 17}',
        "metadata/metadata": b"{}", "default/w/0.0": X,
    }  # fmt: skip
    tree = series_of(arrays, 100, 200)
    assert tree.find("step_*") == "step_200"
    [reason] = tree.without("step_200/metadata/metadata").find_reasons("step_*").values()
    assert "metadata is missing" in reason
    pending = {**MARKED["Orbax"], "_CHECKPOINT_METADATA": b'{"commit_timestamp_nsecs": null}'}
    reasons = series_of(MARKED["Orbax"], 100).with_files(below("step_200", pending)).find_reasons("step_*")
    assert "has no time of commit" in reasons["step_200"]


@pytest.mark.parametrize("kind", list(MARKED))
def test_marks_need_no_member_before(kind: str) -> None:
    """T6: an incomplete first set is not named either, however long it lies there."""
    files = MARKED[kind]
    for name in files:
        if kind.startswith("ZeRO") and files[name] == zero_model(2, 2):
            continue  # The other file still tells the world.
        if ".distcp" in name or "-of-" in name or "rank" in name or name == ".metadata" or name == "ckpt.index":
            left = {other: data for other, data in files.items() if other != name}
            assert series_of(left, 100).find("step_*") == "", name


@pytest.mark.parametrize("kind", [*MARKED, *OPEN])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_prefix_of_the_writes_of_a_set_is_named(kind: str, data: st.DataObject) -> None:
    """N7, D6: ranks write in any order; at any moment some files are there, some are open, one was cut by a kill."""
    files = MARKED.get(kind) or OPEN[kind]
    order = data.draw(st.permutations(sorted(files)))
    # The writers of these write their mark last, whatever else they do in which order.
    last = [name for name in order if name in LAST_WRITTEN]
    order = [name for name in order if name not in last] + last
    done = data.draw(st.integers(0, len(order) - 1))
    new: dict[str, bytes | TreeFile] = {name: files[name] for name in order[:done]}
    current = files[order[done]]
    content = current.data if isinstance(current, TreeFile) else current
    cut = content[: data.draw(st.integers(0, len(content) - 1))]
    if data.draw(st.booleans()):
        new[order[done]] = TreeFile(cut, OLD_NS, reason=data.draw(st.sampled_from(["", "is not sealed yet"])))
    if order[done].endswith((".txt", "_CHECKPOINT_METADATA")):
        new.pop(order[done], None)  # Written by one small write: there or not.
    tree = series_of(files, 100).with_files(below("step_200", new))
    assert tree.find("step_*") == "step_100"


@pytest.mark.parametrize("numbers", [[(1, 900), (2, 5000)], [(0, 0), (1, 100)], [(0, 1), (1, 2), (1, 10)]])
def test_several_numbers_in_the_names_of_parts(numbers: list[tuple[int, int]]) -> None:
    """T5: the number of a shard may be that of the epoch, and both counters may be equal."""
    tree = SeriesTree.of({f"checkpoint_{epoch}_{step}-shard{part}.pt": archive() for epoch, step in numbers for part in range(2)})
    epoch, step = numbers[-1]
    assert tree.find("checkpoint_*_*-shard0.pt") == f"checkpoint_{epoch}_{step}-shard0.pt"
    epoch, step = numbers[-2]
    one_part = tree.without(f"checkpoint_{numbers[-1][0]}_{numbers[-1][1]}-shard1.pt")
    assert one_part.find("checkpoint_*_*-shard0.pt") == f"checkpoint_{epoch}_{step}-shard0.pt"


def test_an_epoch_decides_before_the_steps_within_it() -> None:
    """N2: iterations that are counted anew in each epoch, in place and in the history, as 0.2.0 recorded its sets: the step first."""
    tree = SeriesTree.of({"epoch_1_iter_900.pth": archive(), "epoch_2_iter_200.pth": archive()})
    assert tree.find("epoch_*_iter_*.pth") == "epoch_2_iter_200.pth"
    kept = [
        KnownSet((900, 1), b"epoch_1_iter_900.pth", 1, True, HISTORY + b"epoch_1_iter_900.pth@1"),
        KnownSet((200, 2), b"epoch_2_iter_200.pth", 2, True, HISTORY + b"epoch_2_iter_200.pth@2"),
    ]
    files: dict[str, bytes | TreeFile] = {os.fsdecode(one.entry + b"/" + one.name): archive() for one in kept}
    for order in itertools.permutations(kept):
        tree = SeriesTree.of(files, known=KnownSets(order, None, b"epoch_*_iter_*.pth"))
        assert tree.find("epoch_*_iter_*.pth") == "epoch_*_iter_*.pth/epoch_2_iter_200.pth@2/epoch_2_iter_200.pth"
        newest = tree.search("epoch_*_iter_*.pth").newest
        assert newest is not None and newest.number == 200
        mixed = tree.with_files({"epoch_1_iter_950.pth": archive()})
        assert mixed.find("epoch_*_iter_*.pth") == "epoch_*_iter_*.pth/epoch_2_iter_200.pth@2/epoch_2_iter_200.pth"


# --- one mark after the other -------------------------------------------------------------------------------------------


def test_an_old_metadata_over_new_shards() -> None:
    """T6: overwriting a set; until its own `.metadata` is there the set is of two saves."""
    tree = series_of(MARKED["DCP"], 100, 200)
    tree = tree.with_files({"step_200/__1_0.distcp": TreeFile(X, NEWER + 1)})
    assert tree.find("step_*") == "step_100"
    assert tree.find_reasons("step_*") == {"step_200": ".metadata is older than __1_0.distcp: it belongs to the save before"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({".metadata": b""}, ".metadata is empty"),
        ({".metadata": metadata("__0_0.distcp", "__1_0.distcp")[:-9]}, ".metadata ends before its pickle is complete"),
        ({".metadata": b"no pickle"}, ".metadata cannot be read"),
        ({".metadata": TreeFile(pickle.dumps({}), NEWER)}, ".metadata names no shard"),
        ({".metadata": TreeFile(metadata("__0_0.distcp", "__2_0.distcp"), NEWER)}, "__2_0.distcp is missing, which .metadata names"),
        ({"__0_0.distcp": X[:-1]}, "__0_0.distcp has 99 bytes, but .metadata says 100"),
        ({"__0_0.distcp": TreeFile(X, reason="is not sealed yet")}, "__0_0.distcp is not sealed yet"),
        ({"__0_0.distcp": TreeFile(X, error=errno.EIO)}, "__0_0.distcp cannot be read: Input/output error"),
    ],
)
def test_what_a_dcp_directory_lacks(change: dict[str, bytes | TreeFile], reason: str) -> None:
    """T6."""
    tree = series_of(MARKED["DCP"], 100, 200).with_files(below("step_200", change))
    assert tree.find("step_*") == "step_100" and tree.find_reasons("step_*")["step_200"].startswith(reason)


def test_an_index_names_files_of_subdirectories() -> None:
    """T6: all of the path counts, not only its first part."""
    files = {"model.safetensors.index.json": weights("a/1.safetensors", "2.safetensors"), "2.safetensors": safetensors()}
    whole = series_of({**files, "a/1.safetensors": safetensors(), "b/c": X}, 100)
    assert whole.find("step_*") == "step_100"
    tree = series_of({**files, "a/c": X}, 100)
    assert tree.find_reasons("step_*") == {"step_100": "a/1.safetensors is missing, which model.safetensors.index.json names"}


def test_fewer_ranks_after_a_restart() -> None:
    """T7, late and right: `.metadata` says how many shards there are; without marks the third member of the smaller size counts."""
    fewer: dict[str, bytes | TreeFile] = {"__0_0.distcp": X, ".metadata": TreeFile(metadata("__0_0.distcp"), NEWER)}
    assert series_of(MARKED["DCP"], 100).with_files(below("step_200", fewer)).find("step_*") == "step_200"
    tree = series_of({"mp_rank_00_model_states.pt": zero_model(4), **dict.fromkeys(RANKS, X)}, 100)
    tree = tree.with_files(below("step_200", {"mp_rank_00_model_states.pt": zero_model(2), **dict.fromkeys(RANKS[:2], X)}))
    assert tree.find("step_*") == "step_200"
    tree = series_of(OPEN["ranks"], 100)
    for number, expected in ((200, "step_100"), (300, "step_100"), (400, "step_400")):
        tree = tree.with_files(below(f"step_{number}", {"rank0.pt": X}))
        assert tree.find("step_*") == expected


def test_subdirectories_are_sets_too() -> None:
    """T6."""
    both = {
        **{f"optim/{name}": data for name, data in MARKED["DCP"].items()},
        **{f"model/{name}": data for name, data in MARKED["DCP"].items()},
    }
    tree = series_of(both, 100, 200).without("step_200/optim/.metadata")
    assert tree.find_reasons("step_*") == {"step_200": "optim/.metadata is not there yet"}
    tree = series_of(both, 100, 200).without(*(f"step_200/optim/{name}" for name in MARKED["DCP"]))
    assert tree.find("step_*") == "step_100", "a set that was not begun is missing, too"


def test_a_first_set_without_marks_must_be_left_alone() -> None:
    """N7: nothing tells that no more files are to come, so time must. The search waits that long, and looks again."""
    tree = series_of(OPEN["three files"], 100)
    tree.age_s = 0.5
    assert tree.find("step_*") == "step_100" and tree.waited_s == pytest.approx(1.5)
    tree = series_of(OPEN["three files"], 100)
    tree.age_s = 0.5
    tree.while_waiting = lambda tree: tree.files.update({b"step_100/more.bin": TreeFile(X)})
    found = tree.search("step_*")
    assert found.newest is None and "to compare it with" in found.rejected[0].verdict.incomplete_reason
    tree = series_of(OPEN["three files"], 100, 200)
    tree.age_s = 0.0
    assert tree.find("step_*") == "step_200" and tree.waited_s == 0, "a member before it tells"


@pytest.mark.parametrize(
    "begun",
    [
        {f"model/{name}": data for name, data in MARKED["DCP"].items()},
        {f"actor/{name}": data for name, data in MARKED["verl"].items()},
        MARKED["index"],
    ],
)
def test_a_first_set_whose_other_part_is_not_begun(begun: dict[str, bytes | TreeFile]) -> None:
    """N7, D6: the marks of one directory, or of the weights, tell nothing of the optimizer."""
    tree = series_of(begun, 100)
    tree.age_s = 0.0
    tree.while_waiting = lambda tree: tree.files.update({b"step_100/optim.pt": TreeFile(X, reason="is not sealed yet")})
    assert tree.find("step_*") == "" and tree.waited_s == pytest.approx(2.0)


def test_a_first_set_of_a_trainer() -> None:
    """D1: `trainer_state.json` is written last. Only the states of other ranks may still come."""
    files = MARKED["HF Trainer"]
    tree = series_of(files, 100)
    tree.age_s = 0.0
    assert tree.find("step_*") == "step_100" and tree.waited_s == 0
    ranks = tree.with_files({f"step_100/rng_state_{rank}.pth": X for rank in range(2)})
    ranks.age_s = 0.0
    assert ranks.find("step_*") == ""


def test_what_nemo_marks_as_unfinished() -> None:
    """D6: the file beside a checkpoint goes when NeMo has finished it."""
    tree = series_of({"weights.pt": archive()}, 100, 200)
    marked = tree.with_files({"step_200-unfinished": b""})
    assert marked.find("step_*") == "step_100" and "step_200-unfinished says" in marked.find_reasons("step_*")["step_200"]
    assert tree.find("step_*") == "step_200"


def test_a_first_set_of_ranks() -> None:
    """D6: one rank of nobody knows how many is not named while others may still write. What Megatron writes last tells."""
    tree = series_of({"rank0.pt": X}, 100)
    tree.age_s = 10
    assert tree.find("step_*") == "" and tree.waited_s == 0
    assert "accepted: 30 s" in tree.find_reasons("step_*")["step_100"]
    tree.age_s = 31
    assert tree.find("step_*") == "step_100"
    tagged = series_of(OPEN["ranks"], 100).with_files({"latest_checkpointed_iteration.txt": b"100\n"})
    tagged.age_s = 1
    assert tagged.find("step_*") == "step_100"
    assert tagged.with_files({"latest_checkpointed_iteration.txt": b"1000"}).find("step_*") == "", "it names another one"
    assert tagged.without("latest_checkpointed_iteration.txt").with_files({"latest": b"step_100"}).find("step_*") == "", "of one rank"
    megatron = series_of({f"mp_rank_{rank:02}/model_optim_rng.pt": archive() for rank in range(3)}, 100)
    megatron.age_s = 3600
    assert megatron.find("step_*") == "" and "latest_checkpointed_iteration.txt" in megatron.find_reasons("step_*")["step_100"]
    assert megatron.with_files({"latest_checkpointed_iteration.txt": b"100"}).find("step_*") == "step_100"
    late = series_of(OPEN["DeepSpeed"], 100).with_files(
        {"latest": b"step_200", f"step_200/{RANKS[0]}": X, "step_200/mp_rank_00_model_states.pt": X}
    )
    assert late.find("step_*") == "step_100", "a tag proves nothing against what is missing"


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["rank_0.pt", "rank_2.pt", "rank_3.pt"], "rank_1.pt"),
        (["rank_02.pt", "rank_03.pt"], "rank_01.pt"),
        (["shard-00000-of-00002", "shard-00000-of-00001"], "shard-00001-of-00002"),
        ([*RANKS[:2], RANKS[3], "mp_rank_00_model_states.pt"], RANKS[2]),
        ([RANKS[0]], "no file of model_states"),
        (["training_args.bin"], "trainer_state.json"),
        (["a.data-00000-of-00001"], "a.index"),
    ],
)
def test_a_gap(names: list[str], missing: str) -> None:
    """D6: what one directory alone shows."""
    assert missing in series_of(dict.fromkeys(names, X), 100).find_reasons("step_*")["step_100"]


def test_a_text_that_is_empty() -> None:
    """D6: no format and no size tells the end of a text, but the writer of this one was killed."""
    tree = series_of({"model.pt": archive(), "config.yaml": b"layers: 3", "warnings.log": b""}, 100, 200)
    assert tree.with_files(below("step_200", {"config.yaml": b"l: 3"})).find("step_*") == "step_200"
    assert tree.with_files(below("step_200", {"config.yaml": b""})).find("step_*") == "step_100"


def test_a_name_with_a_rank_that_counts_no_ranks() -> None:
    assert series_of({"lora_rank8.safetensors": safetensors()}, 100).find("step_*") == "step_100"


def test_temporary_files_inside() -> None:
    """N7: of a set that is still being written; one beside a mark is left over from a crash."""
    tree = series_of(OPEN["three files"], 100, 200).with_files({"step_200/more.bin.tmp": X})
    assert "temporary name" in tree.find_reasons("step_*")["step_200"]
    assert series_of(MARKED["DCP"], 100).with_files({"step_100/.metadata.tmp": b""}).find("step_*") == "step_100"


# --- sets in the history ------------------------------------------------------------------------------------------------


def test_a_set_in_its_place_is_named_by_its_place() -> None:
    """N2, D1: and it is not judged again: nothing of it is read."""
    tree = series_of(MARKED["DCP"], 100, 200).with_set("step_100", 1).with_set("step_200", 2)
    assert tree.find("step_*") == "step_200" and tree.read_bytes == 0
    other = tree.with_files({"step_200/more": X})
    assert other.find("step_*") == "step_200" and other.read_bytes, "it is another member now, and complete"


def test_a_set_that_is_overwritten_is_named_in_the_history() -> None:
    """T6, D6: until the new one is complete; then the new one."""
    tree = series_of(MARKED["DCP"], 100).with_set("step_100", 17)
    for reason in ("is not sealed yet", ""):
        changed = tree.with_files({"step_100/__0_0.distcp": TreeFile(X, NEWER + 1, reason=reason)})
        assert changed.find("step_*") == "run/step_*/step_100@17"
        assert list(changed.find_reasons("step_*")) == ["step_100"]
    again = changed.with_files({"step_100/.metadata": TreeFile(metadata("__0_0.distcp", "__1_0.distcp"), NEWER + 2)})
    assert again.find("step_*") == "step_100"
    cut = again.with_set("step_100", 18).without("step_100/__1_0.distcp")
    assert cut.find("step_*") == "run/step_*/step_100@18", "of two, the later one"


def test_a_set_that_was_deleted_is_named_in_the_history() -> None:
    """X3: some files of it, all, or the whole series; the newest by its number, not by its place."""
    tree = series_of(OPEN["ranks"], 100, 200).with_set("step_100", 1).with_set("step_200", 2)
    gone = tree.without("step_200/rank1.pt")
    assert gone.find("step_*") == gone.without("step_200/rank0.pt").find("step_*") == "run/step_*/step_200@2"
    nothing = tree.without(*(f"step_{number}/rank{rank}.pt" for number in (100, 200) for rank in (0, 1)))
    assert nothing.siblings == {} and nothing.find("step_*") == "run/step_*/step_200@2"
    newer = gone.with_files(below("step_300", OPEN["ranks"]))
    assert newer.find("step_*") == "step_300"


def test_what_a_killed_rotation_left_of_a_set_is_not_the_answer() -> None:
    """X3, D6: without its index, and without a member before it, the rest looks like a whole one."""
    tree = series_of(OPEN["ranks"], 100).with_files({"step_100/index.json": X}).with_set("step_100", 1)
    left = tree.without("step_100/index.json")
    assert left.find("step_*") == "run/step_*/step_100@1"
    assert left.find_reasons("step_*") == {"step_100": "index.json is missing, which its set step_100@1 has"}
    saved = left.with_files({"step_100/more.txt": X})
    assert saved.find("step_*") == "step_100", "the application writes there again"


def test_a_set_with_a_file_that_cannot_be_read() -> None:
    """D3: it is never the answer, in its place or in the history."""
    tree = series_of(OPEN["ranks"], 100, 200).with_set("step_100", 1)
    tree = tree.with_files({"step_200/rank0.pt": TreeFile(X, reason="has no copy that could be read")}).with_set("step_200", 2)
    assert tree.find("step_*") == "step_100"
    away = tree.without("step_200/rank0.pt", "step_200/rank1.pt")
    assert away.find("step_*") == "step_100" and away.find_reasons("step_*") == {"step_200": "rank0.pt has no copy that could be read"}


def test_a_set_that_was_deleted_before_an_earlier_step_was_saved_is_the_last_resort() -> None:
    """D2: an application that deletes the newest checkpoint and goes on from an older one has gone back."""
    tree = series_of(OPEN["ranks"], 100, 200).with_set("step_200", 1).with_set("step_100", 2)
    deleted = tree.without("step_200/rank0.pt", "step_200/rank1.pt")
    gone, again = tree.known.sets
    tree = replace(deleted, known=tree.known._replace(sets=[again], replaced=[gone]))
    assert deleted.find("step_*") != "step_100" == tree.find("step_*")
    assert tree.without("step_100/rank0.pt", "step_100/rank1.pt").find("step_*").endswith("step_100@2")
    assert replace(tree.without(*tree.files.keys()), known=tree.known).find("step_*") == ""


def test_single_files_and_groups_in_the_history() -> None:
    """H4: the path that a program is given."""
    tree = SeriesTree.of({"step_1.pt": archive(), "ckpt-2.index": X, "ckpt-2.data-00000-of-00001": X})
    tree = tree.with_set("step_1.pt", 1, is_group=True)
    assert tree.find("step_*.pt") == "step_1.pt" and tree.read_bytes == 0
    assert tree.without("step_1.pt").find("step_*.pt") == "run/step_*/step_1.pt@1/step_1.pt"
    group = tree.without("step_1.pt").with_set("ckpt-2", 3, is_group=True)
    assert group.find("ckpt-*.index") == group.find("ckpt-*") == "ckpt-2" and group.read_bytes == 0
    assert group.without("ckpt-2.index").find("ckpt-*") == "run/step_*/ckpt-2@3/ckpt-2"


def test_a_level_that_only_an_older_set_has() -> None:
    safe = {name: TreeFile(X, level=Level.PFS) for name in ("rank0.pt", "rank1.pt")}
    tree = series_of(safe, 100).with_set("step_100", 1).with_files(below("step_200", OPEN["ranks"])).with_set("step_200", 2)
    found = tree.search("step_*", Level.PFS)
    assert found.newest is not None and found.newest.name == b"step_100"
    assert [(one.name, one.find_obstacle(Level.PFS)) for one in found.rejected] == [(b"step_200", "has the level local only")]


def test_a_rollback() -> None:
    """D2: the target, wherever it is, until a set is made that is newer than the rollback; what was rolled back stays."""
    tree = series_of(OPEN["ranks"], 100, 200, 300).with_set("step_100", 1).with_set("step_200", 2).with_set("step_300", 3)
    back = tree.rolled_back_to(1)
    assert back.find("step_*") == "step_100"
    assert back.without("step_100/rank0.pt").find("step_*") == "run/step_*/step_100@1"
    again = back.with_files(below("step_150", OPEN["ranks"]))
    assert again.find("step_*") == "step_100", "the set of step_150 is not made yet"
    made = replace(again, known=KnownSets([], None, b"run/step_*")).with_set("step_150", 4)
    assert replace(made, known=made.known._replace(target=back.known.target)).find("step_*") == "step_150"


# --- what the mount answers -----------------------------------------------------------------------------------------------


MANY = series_of(OPEN["ranks"], *range(1, 41))
SETS = functools.reduce(lambda tree, number: tree.with_set(f"step_{number}", number), range(1, 41), MANY)
UNSAFE = TreeFile(X, reason="is not sealed yet")


def spoil(tree: SeriesTree, *numbers: int) -> SeriesTree:
    return tree.with_files({f"step_{number}/rank0.pt": UNSAFE for number in numbers})


def test_an_answer_travels_as_an_attribute() -> None:
    """D4, N2: with any name."""
    names = [b"step_1", b"caf\xe9_2", "größe_3".encode(), b"4 *\n"]
    found = [LatestMember(number, name, name, Completeness(2, 7, Level.PFS, "wörds"), b"p\xff") for number, name in enumerate(names)]
    for answer in (
        LatestAnswer([Series((b"\xff_", b""))], SearchResult(found[0], found[1:])),
        LatestAnswer([Series((b"state.cpt",), b"state_prev.cpt")], SearchResult(None, found, 17)),
        LatestAnswer([]),
    ):
        assert LatestAnswer.decode(answer.encode()) == answer
    several = LatestAnswer([Series((b"%d_" % number, b"")) for number in range(1000)])
    assert len(several.encode()) < 1000 and len(LatestAnswer.decode(several.encode()).series) > 1, "some are told"


@pytest.mark.parametrize("level", [Level.LOCAL, Level.CLIQUE])
@pytest.mark.parametrize("tree", [MANY, SETS, spoil(MANY, *range(9, 41)), spoil(SETS, *range(9, 41)), spoil(MANY, *range(1, 41))])
def test_a_long_answer_comes_in_parts(tree: SeriesTree, level: Level) -> None:
    """N2: together they are what one search finds."""
    expected, parts, position = tree.search("step_*", level), list[LatestMember](), 0
    while True:
        found = tree.search("step_*", level, first=position, at_most=3)
        assert len(found.rejected) <= 3
        parts += [one for one in found.rejected if one not in parts[-1:]]
        if not (position := found.next_position):
            break
    assert SearchResult(found.newest, parts) == expected


@pytest.mark.parametrize(
    ("private", "expected", "reason"),
    [
        ({"step_3"}, "step_2", "it cannot be read: Permission denied"),
        ({"step_3/rank1.pt"}, "step_2", "rank1.pt cannot be read: Permission denied"),
        ({"step_2"}, "step_3", ""),
        ({"step_2", "step_1"}, "step_3", ""),
        ({"step_3", "step_2", "step_1"}, "", "it cannot be read: Permission denied"),
    ],
)
def test_what_the_caller_may_not_read_is_no_answer(private: set[str], expected: str, reason: str) -> None:
    """F6: neither names nor sizes of it are told, and others are not compared with it."""
    tree = replace(series_of(OPEN["ranks"], 1, 2, 3), private=frozenset(map(os.fsencode, private)))
    assert tree.find("step_*") == expected
    rejected = tree.search("step_*").rejected
    assert [one.verdict.incomplete_reason for one in rejected[:1]] == [reason] * bool(reason)
    assert all(one.verdict.size == 0 for one in rejected)


def test_what_a_private_set_has_is_not_told() -> None:
    """F6, X3: the application deleted a part of it, whose name stands in the history only."""
    tree = SETS.without("step_40/rank1.pt")
    assert "rank1.pt is missing" in tree.find_reasons("step_*")["step_40"]
    hidden = replace(tree, private=frozenset({HISTORY + b"step_40@40"}))
    assert {one.verdict.incomplete_reason for one in hidden.search("step_*").rejected} == {"it cannot be read: Permission denied"}
    assert hidden.find("step_*") == "step_39"


@pytest.mark.parametrize("kind", [*MARKED, *OPEN])
def test_verify_finds_no_fault_with_a_whole_set(kind: str) -> None:
    """H8."""
    assert series_of(MARKED.get(kind) or OPEN[kind], 7).with_set("step_7").find_flaw("step_*") == ""


def test_verify_finds_what_a_set_lacks() -> None:
    """H8: the user said that it was complete."""
    tree = series_of(MARKED["DCP"], 7).without("step_7/__1_0.distcp").with_set("step_7")
    assert "__1_0.distcp is missing" in tree.find_flaw("step_*")
    cut = SeriesTree.of({"step_7.pt": archive()[:-40]})
    entry = HISTORY + b"step_7.pt@1"
    files = {entry + b"/step_7.pt": cut.files[b"step_7.pt"], entry + b"/MANIFEST.json": TreeFile(b"{}")}
    cut = replace(cut, files=files, known=KnownSets([KnownSet((7,), b"step_7.pt", 1, True, entry)]))
    assert "ends before its zip directory" in cut.find_flaw("step_*.pt")


def test_the_mark_beside_a_member_is_no_part_of_its_set() -> None:
    """H8, D6: a rule named it when the set was made."""
    rules.install_rules([SeriesRule("step_*", last="step_*.done")])
    try:
        tree = series_of(OPEN["ranks"], 7).with_files({"step_7.done": TreeFile(b"", NEWER)}).with_set("step_7")
        assert tree.find("step_*") == "step_7" and tree.find_flaw("step_*") == ""
    finally:
        rules.install_rules([])


# --- files --------------------------------------------------------------------------------------------------------------


def test_single_files() -> None:
    """N2: what shows its end needs no comparison; the first of an unknown format counts once it is sealed."""
    tree = SeriesTree.of({"step_100.pt": archive(900), "step_200.pt": archive(100)})
    assert tree.find("step_*.pt") == "step_200.pt", "a smaller one, but whole"
    assert tree.with_files({"step_200.pt": archive(900)[:-1]}).find("step_*.pt") == "step_100.pt"
    assert SeriesTree.of({"step_100.bin": X}, age_s=0.0).find("step_*.bin") == "step_100.bin"
    assert SeriesTree.of({"step_100.dat": b""}).find_reasons("step_*.dat") == {"step_100.dat": "it is empty"}


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([100, 100], 2),
        ([100, 99], 1),
        ([100, 50], 1),
        ([100, 100, 99], 2),
        ([100, 98, 97], 3),
        ([100, 98, 80], 1),
        ([100, 99, 90], 3),
        ([100, 99, 88], 1),
        ([100, 10, 20], 1),
        ([100, 120], 2),
    ],
)
def test_an_unknown_format_is_told_by_its_size(sizes: list[int], expected: int) -> None:
    """N7: as large as before, or where sizes vary anyway, nearly."""
    tree = SeriesTree.of({f"step_{number}.dat": bytes(size) for number, size in enumerate(sizes, 1)})
    assert tree.find("step_*.dat") == f"step_{expected}.dat"


def test_the_pfs_is_gone() -> None:
    """D3: a file that cannot be read now is no checkpoint now."""
    tree = SeriesTree.of({"step_100.pt": archive(), "step_200.pt": TreeFile(archive(), level=Level.PFS, error=errno.EIO)})
    assert tree.find("step_*.pt") == "step_100.pt"
    assert tree.find_reasons("step_*.pt") == {"step_200.pt": "it cannot be read: Input/output error"}


def test_parts_in_one_directory() -> None:
    """D6: files that differ in a rank only are one member, whichever of them is named."""
    tree = SeriesTree.of({f"step{number}_rank{rank}.pt": archive() for number in (100, 200) for rank in (0, 1)})
    for rank in (0, 1):
        assert tree.find(f"step*_rank{rank}.pt") == f"step200_rank{rank}.pt"
        assert tree.without(f"step200_rank{1 - rank}.pt").find(f"step*_rank{rank}.pt") == f"step100_rank{rank}.pt"


@pytest.mark.parametrize(("name", "pattern"), [("step{}_rank{}.pt", "step*_rank*.pt"), ("ckpt_{}_{}.bin", "ckpt_*_*.bin")])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_pattern_for_all_ranks(name: str, pattern: str, ranks: int) -> None:
    """T5, D6: any rank missing or cut, also one that has the number of a step."""
    for first, second in ((100, 200), (1, 2)):
        tree = SeriesTree.of({name.format(step, rank): archive() for step in (first, second) for rank in range(ranks)})
        assert tree.find(pattern) == name.format(second, 0) and tree.find_reasons(pattern) == {}
        for rank in range(ranks):
            file = name.format(second, rank)
            assert tree.without(file).find(pattern) == name.format(first, 0), file
            assert tree.without(file).find_reasons(pattern)[name.format(second, 0)], file
            assert tree.with_files({file: archive()[:-1]}).find(pattern) == name.format(first, 0), file


def lightning(step: int) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as found:
        found.writestr("archive/data.pkl", pickle.dumps({"epoch": 2, "global_step": step, "loops": {"global_step": 7}}, protocol=2))
    return file.getvalue()


@pytest.mark.parametrize(("step", "expected"), [(29, "epoch=0-step=30.ckpt"), (30, "epoch=0-step=30.ckpt"), (31, "last.ckpt")])
def test_the_newest_state_says_its_step(step: int, expected: str) -> None:
    """N2: whenever it was written; of the same step, the member is named, whose name lasts."""
    for time_ns in (OLD_NS - 1, NEWER):
        tree = SeriesTree.of({**LAST, "epoch=0-step=30.ckpt": lightning(30), "last.ckpt": TreeFile(lightning(step), time_ns)})
        assert find_inside(tree) == expected


def test_the_first_bare_rank() -> None:
    """D6, T5: others may come, and one of them may be late."""
    tree = SeriesTree.of({"ckpt_100_0.bin": X}, age_s=10.0)
    assert tree.find("ckpt_*_*.bin") == "" and tree.waited_s == 0
    tree.age_s = 31.0
    assert tree.find("ckpt_*_*.bin") == "ckpt_100_0.bin"
    late = tree.with_files({"ckpt_100_2.bin": X})
    assert late.find_reasons("ckpt_*_*.bin") == {"ckpt_100_0.bin": "ckpt_100_1.bin is missing"}
    for name in ("ckpt_{}_{}.bin", "step{}_rank{}.bin"):
        pattern = name.replace("{}", "*")
        ranks = {name.format(200, rank): TreeFile(X, reason="is not sealed yet") for rank in range(4)}
        rotated = SeriesTree.of({name.format(100, 3): X, **ranks})
        reason = rotated.find_reasons(pattern)[name.format(100, 0)]
        assert reason == name.format(100, 0) + " is missing", "a killed rotation has left one"


def test_a_metric_does_not_tell_which_is_newer() -> None:
    """N2: of members with equal counters, the one that was written last is; and the set that was completed last."""
    names = ["epoch=00-loss=10.25.ckpt", "epoch=00-loss=0.25.ckpt", "epoch=00-loss=7.50.ckpt"]
    for order in itertools.permutations(names):
        tree = SeriesTree.of({name: TreeFile(archive(), OLD_NS + number) for number, name in enumerate(order)})
        assert tree.find("epoch=*-loss=*.*.ckpt") == order[-1]
        assert tree.with_files({order[-1]: archive()[:-1]}).find("epoch=*-loss=*.*.ckpt") == order[-2]
        kept = [KnownSet((0, *map(int, re.findall("[0-9]+", name)[1:])), name.encode(), number, True, HISTORY + b"%d" % number)
                for number, name in enumerate(order, 1)]  # fmt: skip
        files = {os.fsdecode(one.entry + b"/" + one.name): archive() for one in kept}
        assert SeriesTree.of(files, known=KnownSets(kept, None, b"h")).find("epoch=*-loss=*.*.ckpt").startswith(f"h/{order[-1]}@3")
    last = SeriesTree.of({"m-step=20.ckpt": archive(), "m-step=20-last.ckpt": TreeFile(archive(), NEWER)})
    assert last.find("m-step=*.ckpt") == "m-step=20-last.ckpt"


LAST: dict[str, bytes | TreeFile] = {
    "epoch=0-step=30.ckpt": archive(),
    "epoch=0-step=20.ckpt": archive(),
    "last.ckpt": TreeFile(archive(), NEWER),
}
"""As Lightning leaves it with `save_top_k=2` and `save_last`: step 100 is in `last.ckpt` only."""


def find_inside(tree: SeriesTree) -> str:
    newest = tree.search("epoch=*-step=*.ckpt", last_names=True).newest
    return "" if newest is None else os.fsdecode(newest.name)


def test_the_newest_state_beside_the_best_ones() -> None:
    """N2: in a directory, a file that was written after all members; a pattern means what it matches."""
    tree = SeriesTree.of(LAST)
    assert find_inside(tree) == "last.ckpt" and tree.find("epoch=*-step=*.ckpt") == "epoch=0-step=30.ckpt"
    assert find_inside(tree.with_files({"last-v1.ckpt": TreeFile(archive(), NEWER + 1)})) == "last-v1.ckpt"
    for unfit in (archive()[:-1], b"", archive(1), TreeFile(archive(), OLD_NS - 1), TreeFile(archive(), NEWER, reason="is not sealed yet")):
        assert find_inside(tree.with_files({"last.ckpt": unfit})) == "epoch=0-step=30.ckpt"
    newer = tree.with_files({"epoch=1-step=110.ckpt": TreeFile(archive(), NEWER + 1)})
    assert find_inside(newer) == "epoch=1-step=110.ckpt"
    assert find_inside(newer.with_files({"epoch=1-step=110.ckpt": TreeFile(archive()[:-1], NEWER + 1)})) == "last.ckpt"
    only = tree.without("epoch=0-step=20.ckpt").with_files({"epoch=0-step=30.ckpt": TreeFile(archive(), reason="is not sealed yet")})
    assert find_inside(only) == "last.ckpt"
    assert find_inside(tree.without("last.ckpt").with_files({"last.ckpt/x": TreeFile(archive(), NEWER)})) == "epoch=0-step=30.ckpt"


def test_the_first_rank_in_one_directory() -> None:
    """D6, T5: a file that counts ranks is never alone: others may come."""
    tree = SeriesTree.of({"step100_rank0.pt": archive()}, age_s=10.0)
    assert tree.find("step*_rank0.pt") == "" and tree.waited_s == 0
    tree.age_s = 31.0
    assert tree.find("step*_rank0.pt") == "step100_rank0.pt"


def test_data_of_tensorflow_without_its_index() -> None:
    """H4: the first checkpoint, killed between its two files."""
    tree = SeriesTree.of({"ckpt-1.data-00000-of-00001": X})
    assert tree.find_reasons("ckpt-*") == {"ckpt-1": "ckpt-1.index is not there yet"}
    cut = tree.with_files({"ckpt-1.index": TABLE[:-1]})
    assert cut.find_reasons("ckpt-*") == {"ckpt-1": "ckpt-1.index ends before its last mark; its writer did not finish it"}


LAMMPS = b"\x2e\0\0\0" + X + b"LammpS RestartT\0"


def test_a_file_for_each_process_of_lammps() -> None:
    """H4: restarted from `melt.%.100`; sizes vary as atoms move from one process to another."""
    parts = {f"melt.{part}.{step}": LAMMPS for step in (100, 200) for part in (0, 1)}
    tree = SeriesTree.of({**parts, "melt.base.100": LAMMPS, "melt.base.200": LAMMPS, "melt.1.200": LAMMPS[20:]})
    assert tree.find("melt.%.*") == "melt.%.200"
    for part in (0, 1, "base"):
        name = f"melt.{part}.200"
        assert tree.without(name).find("melt.%.*") == "melt.%.100"
        assert tree.with_files({name: LAMMPS[:-1]}).find("melt.%.*") == "melt.%.100"
    assert not set_kinds.list_kinds(DirectoryFacts({b"database.bin": MemberFile(1, Level.LOCAL)})), "only a name"
    assert tree.with_files({"melt.base.200": b""}).without("melt.1.200", "melt.1.100").find("melt.%.*") == "melt.%.100", "base is empty"
    parts_only = tree.without("melt.base.100", "melt.base.200")
    assert parts_only.find("melt.1.*") == "" and "name with base" in parts_only.find_reasons("melt.1.*")["melt.1.200"]
    first = tree.without("melt.base.200", "melt.0.200", "melt.1.200", "melt.1.100")
    first.age_s = 10.0
    assert first.find("melt.%.*") == "", "more processes may come"


def test_lammps_says_how_many_parts_there_are() -> None:
    """H4, D6: at the end of the file with "base". So the first set needs no comparison, and a restart on fewer processes no patience."""
    for end in (b"\x2c\0\0\0%c\0\0\0\x2d\0\0\0\0\0\0\0\xff\xff\xff\xff", bytes(16) + b"\x2c\0\0\0%c\0\0\0\xff\xff\xff\xff"):
        base = {step: b"LammpS RestartT\0" + X + end % parts + b"LammpS RestartT\0" for step, parts in ((100, 3), (200, 2))}
        files = {"melt.base.100": base[100], **{f"melt.{part}.100": LAMMPS for part in range(3)}}
        first = SeriesTree.of(files, age_s=3.0)
        assert first.find("melt.%.*") == "melt.%.100" and first.waited_s == 0
        assert first.without("melt.0.100").find("melt.%.*") == ""
        for part in (1, 2):
            assert first.without(f"melt.{part}.100").find_reasons("melt.%.*") == {"melt.%.100": f"melt.{part}.100 is missing"}
        tree = first.with_files({"melt.base.200": base[200], "melt.0.200": LAMMPS, "melt.1.200": LAMMPS})
        assert tree.find("melt.%.*") == "melt.%.200"


def test_images_of_dmtcp() -> None:
    """H2: each checkpoint replaces the images, then the coordinator writes the script that names them."""
    images = ["ckpt_a.out_e7ebb8f7-40000-2ea8705f82c.dmtcp", "ckpt_sh_e7ebb8f7-41000-2ea8705f900.dmtcp"]
    script = "dmtcp_restart_script_e7ebb8f7-40000-2ea8705f7d0.sh"
    names = "".join(f" /scratch/run/{name}" for name in images).encode()
    text = (
        b"#!/bin/bash\n# Number of processes in the computation = 2\ngiven_ckpt_files=\"%s\"\nworker_ckpts='\n :: node1 :bg:%s : ssh\n'\n"
        % (names, names)
    )
    one = Series((b"dmtcp_restart_script.sh",))
    tree = SeriesTree.of({**dict.fromkeys(images, X), script: TreeFile(text, NEWER), "a.out": X}, age_s=0.0)
    assert patterns.list_series(tree.siblings) == [one] and tree.find(one) == "dmtcp_restart_script.sh"
    for image in images:
        assert tree.without(image).find(one) == ""
        again = tree.with_files({image: TreeFile(X, NEWER + 1)})
        assert again.find_reasons(one) == {"dmtcp_restart_script.sh": f"{script} is older than {image}: it belongs to the save before"}
    assert tree.without(script).find_reasons(one) == {"dmtcp_restart_script.sh": "dmtcp_restart_script.sh is not there yet"}
    assert tree.with_files({script: b""}).find(one) == "" and tree.with_files({f"{images[0]}.temp": X}).find(one)
    cut = tree.with_files({script: text[: text.index(images[1].encode())]})
    assert cut.find_reasons(one)["dmtcp_restart_script.sh"].startswith(f"{script} does not name all images")
    ended = "dmtcp_restart_script_e7ebb8f7-40000-1ea8705f7d0.sh"
    assert tree.with_files({ended: b'given_ckpt_files=" /x/ckpt_b_1-2-3.dmtcp"'}).find(one), "of a computation that is gone"


def test_images_of_criu() -> None:
    """H2: the inventory is written when all tasks are; sizes vary with the memory of the process."""
    files = {"pstree.img": X, "core-17.img": X, "pages-1.img": X + X, "inventory.img": X, "stats-dump": X}
    tree = series_of(files, 1).with_files(below("step_2", {**files, "pages-1.img": X}))
    assert tree.find("step_*") == "step_2"
    reasons = tree.without("step_2/inventory.img", "step_2/stats-dump").find_reasons("step_*")
    assert reasons == {"step_2": "inventory.img is not there yet"}


def test_a_clock_that_is_ahead() -> None:
    """N2: a file with a time to come is judged like any other."""
    assert SeriesTree.of({"step_1.pt": archive()}, age_s=-5.0).find("step_*.pt") == "step_1.pt"


def test_a_trainer_that_was_killed_at_its_first_checkpoint() -> None:
    """N7: nothing of it says yet who writes. Programs that use the name otherwise are believed at their third, or at their last file."""
    files: dict[str, bytes | TreeFile] = {"config.json": b"{}", "model.safetensors": safetensors()}
    tree = SeriesTree.of({f"checkpoint-{number}/{name}": data for number in (1, 2) for name, data in files.items()})
    gap, hint = "trainer_state.json is not there yet", "; if no Trainer writes here, `ckptfs commit` makes it a set"
    assert tree.find_reasons("checkpoint-*") == {f"checkpoint-{number}": gap + hint for number in (1, 2)}
    assert tree.with_files(below("checkpoint-3", files)).find("checkpoint-*") == "checkpoint-3"
    assert tree.with_files({"checkpoint-2/random_states_0.pkl": b"\x80\x04."}).find("checkpoint-*") == "checkpoint-2"
    assert tree.with_files(below("checkpoint-2", MARKED["DCP"])).find("checkpoint-*") == "checkpoint-2"


@pytest.mark.parametrize(
    ("made", "gone"),
    [
        ({"checkpoint-2/training_args.bin": b"x"}, ()),
        ({"checkpoint-1/trainer_state.json": b"{}"}, ()),
        ({"checkpoint-1/generation_config.json": b"{}"}, ()),
        ({}, ("checkpoint-2/model.safetensors",)),
    ],
)
def test_a_commit_is_proposed_only_if_nothing_else_is_missing(made: dict[str, bytes | TreeFile], gone: tuple[str, ...]) -> None:
    """N7: not if a Trainer shows, here or in an older member, and not if an older member has more files."""
    files: dict[str, bytes | TreeFile] = {"config.json": b"{}", "model.safetensors": safetensors()}
    tree = SeriesTree.of({f"checkpoint-{number}/{name}": data for number in (1, 2) for name, data in files.items()})
    assert "ckptfs commit" in tree.find_reasons("checkpoint-*")["checkpoint-2"]
    reason = tree.with_files(made).without(*gone).find_reasons("checkpoint-*")["checkpoint-2"]
    assert reason == "trainer_state.json is not there yet"
    young = SeriesTree.of(tree.files, age_s=1.0).find_reasons("checkpoint-*")["checkpoint-2"]
    assert young == reason, "more may come"


def test_tensorflow_in_one_directory() -> None:
    """H4: the prefix from which TensorFlow restores."""
    names = ["{}.index", "{}.data-00000-of-00002", "{}.data-00001-of-00002"]
    files = {name.format(f"ckpt-{number}"): TABLE for number in (1, 2) for name in names}
    tree = SeriesTree.of({**files, "checkpoint": b'model_checkpoint_path: "ckpt-2"'})
    for pattern in ("ckpt-*", "ckpt-*.index"):
        assert tree.find(pattern) == "ckpt-2"
        for name in names:
            if "{}" + pattern.removeprefix("ckpt-*") != name:
                assert tree.without(name.format("ckpt-2")).find(pattern) == "ckpt-1"


def test_gromacs() -> None:
    """H1: `state.cpt`, else `state_prev.cpt`."""
    whole = b"\x00\x02\x9f\x29" + X + b"\x00\x02\x9f\x2b"
    pair = Series((b"state.cpt",), b"state_prev.cpt")
    tree = SeriesTree.of({"state.cpt": whole, "state_prev.cpt": whole})
    assert tree.find(pair) == "state.cpt"
    assert tree.with_files({"state.cpt": whole[:-1]}).find(pair) == tree.without("state.cpt").find(pair) == "state_prev.cpt"


def test_numbers_in_the_names_of_files() -> None:
    """T5: the number of the member may stand in the names of its files, and a rank may have the same number."""
    tree = SeriesTree.of(
        {f"step_{number}/{name}": X for number in (1, 2) for name in (f"model_{number:03}.bin", "rank_0.bin", "rank_1.bin")}
    )
    assert tree.find("step_*") == "step_2"
    assert tree.without("step_2/model_002.bin").find_reasons("step_*") == {"step_2": "no file is like model_001.bin, which step_1 has"}
    assert tree.without("step_2/rank_1.bin").find_reasons("step_*") == {"step_2": "no file is like rank_1.bin, which step_1 has"}
    assert tree.without("step_2/rank_0.bin").find_reasons("step_*") == {"step_2": "rank_0.bin is missing, which step_1 has"}


# --- the search ---------------------------------------------------------------------------------------------------------


def test_levels_and_reasons() -> None:
    """N2: the newest that is at least as safe as asked for; each newer one with its reason."""
    tree = SeriesTree.of(
        {"s_1": TreeFile(X, level=Level.PFS), "s_2": TreeFile(X, level=Level.LOCAL), "s_3": TreeFile(X, reason="is not sealed yet")}
    )
    found = tree.search("s_*", Level.CLIQUE)
    assert found.newest is not None and found.newest.name == b"s_1" and found.newest.number == 1
    reasons = [(one.name, one.find_obstacle(Level.CLIQUE)) for one in found.rejected]
    assert reasons == [(b"s_3", "it is not sealed yet"), (b"s_2", "has the level local only")]
    assert found.newest.find_obstacle(Level.CLIQUE) == ""
    assert tree.search("s_*", Level.NONE).newest == tree.search("s_*", Level.LOCAL).newest
    assert tree.search("other_*") == SearchResult(None, [])


def test_a_member_that_is_deleted_meanwhile() -> None:
    tree = SeriesTree.of({"step_1/a": X, "step_2/a": X})

    class Deleting(SeriesTree):
        async def list_files(self, entry: bytes) -> Listing[bytes]:
            if entry == b"step_2":
                raise FileNotFoundError(entry)
            return await super().list_files(entry)

    deleting = Deleting(tree.files)
    assert deleting.find("step_*") == "step_1" and deleting.find_reasons("step_*") == {"step_2": "it was deleted just now"}


def test_a_search_reads_little() -> None:
    """N2: older members are listed, not read."""
    tree = series_of({f"rank{rank}.pt": archive(1 << 20) for rank in range(8)}, *range(1, 6))
    assert tree.find("step_*") == "step_5" and tree.read_bytes < 8 * 2000


@pytest.mark.parametrize("levels", list(itertools.product(list(Level)[1:], repeat=2)))
def test_a_member_is_as_safe_as_its_weakest_file(levels: tuple[Level, Level]) -> None:
    order = list(Level)
    found = judge(MemberFacts((1,), {b"f%d" % number: MemberFile(5, level) for number, level in enumerate(levels)}), [], 3600)
    weakest = min(order.index(level) for level in levels)
    assert (order.index(found.level), found.size, found.files) == (weakest, 10, 2)
    assert [found.has_level(wanted) for wanted in order] == [weakest >= number for number in range(len(order))]


def test_an_empty_member() -> None:
    assert judge(MemberFacts((1,), {}), [], 3600).incomplete_reason == "it holds no file"
    assert judge(MemberFacts((1,), {b"a": MemberFile(0, Level.LOCAL)}), [], 3600).incomplete_reason == "all its files are empty"


# --- what the catalog knows ---------------------------------------------------------------------------------------------


def record(state: ContentState | None, copy: CopyState | None, published: bool, elsewhere: bool) -> FileRecord:
    shown = PublishedRow(1, 3, True, 10, 0, 1, DIGEST, None) if published else None
    clique = CliqueCopies("a", 2, (("other", "b"),) if elsewhere else ())
    if state is None:
        return FileRecord(None, (), shown, 0, clique)
    copies = () if copy is None else (Copy(1, Tier.RAM, copy, 1),)
    return FileRecord(Content(1, 1, 3, state, 10, DIGEST, None, 1), copies, shown, 0, clique)


STATES = [None, *ContentState]
COPIES = [None, *CopyState]


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("state", STATES)
def test_what_a_checkpoint_can_rest_on(state: ContentState | None, copy: CopyState | None, elsewhere: bool, published: bool) -> None:
    """N7: what is not sealed never; what is sealed only while a living copy can be read."""
    found = find_incomplete_reason(record(state, copy, published, elsewhere), 10)
    if state is None:
        assert (found == "") == published
    elif state in (ContentState.OPEN, ContentState.CLOSED):
        assert found == "is not sealed yet"
    elif state is ContentState.SEALED:
        assert (found == "") == (published or elsewhere or copy is CopyState.GOOD)
    else:
        assert (found == "") == (published and state is ContentState.LOST)


def test_an_empty_file_needs_no_copy() -> None:
    assert find_incomplete_reason(FileRecord(None), 0) == ""
    assert find_incomplete_reason(FileRecord(None), 1) == "has no copy that could be read"
