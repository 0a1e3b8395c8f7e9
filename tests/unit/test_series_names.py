"""Names of series and members: T5. Pure, so every case is tried."""

import itertools
import time
from collections.abc import Callable

import pytest

from ckptfs.series import patterns
from ckptfs.series.patterns import Series, find_last_names, is_temporary, list_members, list_patterns, suggest_series


def found(names: list[bytes]) -> list[bytes]:
    return [one.name for one in patterns.list_series(names)]


def member(name: bytes, *siblings: bytes) -> bytes | None:
    one = patterns.find_series(name, siblings)
    return None if one is None else one.name


@pytest.mark.parametrize(
    ("names", "name"),
    [
        ([b"CHECKPOINT_DIR_step5", b"CHECKPOINT_DIR_step10"], b"CHECKPOINT_DIR_step*"),
        ([b"step_100", b"step_200", b"config.json"], b"step_*"),
        ([b"ckpt_100.pt", b"ckpt_200.pt", b"ckpt_200.pt.tmp"], b"ckpt_*.pt"),
        ([b"run-000100.restart", b"run-000200.restart"], b"run-*.restart"),
        ([b"llama3-8b_step100", b"llama3-8b_step200"], b"llama3-8b_step*"),
        ([b"100", b"200"], b"*"),
        ([b"step_100", b"notes", b"tokenizer"], b"step_*"),
        ([b"step_100", b"step_200", b"tokenizer_v2.json"], b"step_*"),
        ([b"epoch=1-step=200.ckpt", b"epoch=1-step=300.ckpt", b"last.ckpt"], b"epoch=*-step=*.ckpt"),
        ([b"epoch=1-step=200.ckpt"], b"epoch=*-step=*.ckpt"),
        ([b"epoch=3-step=9-loss=0.25.ckpt", b"epoch=4-step=12-loss=1.5.ckpt"], b"epoch=*-step=*-loss=*.*.ckpt"),
        ([b"weights.01-0.91.hdf5", b"weights.02-1.5.hdf5", b"weights.10-0.75.hdf5"], b"weights.*-*.*.hdf5"),
        ([b"epoch_1_loss_1.25.pth", b"epoch_2_loss_0.5.pth"], b"epoch_*_loss_*.*.pth"),
        ([b"1-20", b"1-30", b"2-40"], b"*-*"),
        ([b"0", b"0.05", b"0.1", b"1", b"1.5", b"constant", b"system"], b"*"),
        ([b"checkpoint-10", b"tmp-checkpoint-20"], b"checkpoint-*"),
        ([b"step_8.pt", b".step_9.pt.Xb3aQd", b".nfs0000000000000001"], b"step_*.pt"),
        ([b"global_step100", b"latest", b"zero_to_fp32.py"], b"global_step*"),
        ([b"iter_0000100", b"latest_checkpointed_iteration.txt"], b"iter_*"),
        ([b"melt.100.restart", b"melt.200.restart", b"log.lammps"], b"melt.*.restart"),
        ([b"100", b"200.orbax-checkpoint-tmp-1700000000"], b"*"),
        ([b"model_100.h5"], b"model_*.h5"),
        ([b"state.cpt", b"state_prev.cpt", b"md.log"], b"state.cpt"),
        ([b"state.cpt"], b"state.cpt"),
        ([b"run1_prev.cpt"], b"run1.cpt"),
        ([b"run_prev.cpt", b"run_step300.cpt"], b"run.cpt"),
        ([b"run.cpt", b"run_prev.cpt", b"run_step300.cpt", b"run_step400.cpt"], b"run.cpt"),
        ([b"run_step300.cpt", b"run_step400.cpt"], b"run_step*.cpt"),
        ([b"ckpt-1.index", b"ckpt-1.data-00000-of-00001", b"ckpt-2.index", b"checkpoint"], b"ckpt-*"),
        ([b"epoch=1-step=20.ckpt", b"epoch=1-step=20-v1.ckpt", b"epoch=2-step=40-v1.ckpt", b"last-v1.ckpt"], b"epoch=*-step=*.ckpt"),
        ([b"melt.base.100", b"melt.0.100", b"melt.1.100", b"melt.base.200", b"melt.0.200", b"melt.1.200"], b"melt.%.*"),
        ([b"melt.base.100", b"melt.0.100", b"melt.base.200", b"melt.1.200", b"melt.1.300", b"melt.2.300"], b"melt.%.*"),
        ([b"restart.base", b"restart.0", b"restart.1", b"log.lammps"], b"restart.%"),
        ([b"ckpt_a.out_e7ebb8f7-40000-2ea8705f82c.dmtcp", b"ckpt_a.out_e7ebb8f7-41000-2ea87060011.dmtcp.temp"], b"dmtcp_restart_script.sh"),
        (
            [b"ckpt_sh_19d0e6-40000-58.dmtcp", b"dmtcp_restart_script_19d0e6-40000-57.sh", b"dmtcp_restart_script.sh"],
            b"dmtcp_restart_script.sh",
        ),
        ([b"iter_0000100", b"iter_0000200", b"latest_checkpointed_iteration.txt", b"progress.txt"], b"iter_*"),
        ([b"ep0-ba50", b"ep1-ba100", b"ep2-ba30"], b"ep*-ba*"),
        ([b"wrfrst_d01_2026-01-31_00:00:00"], b"wrfrst_d01_*-*-*_*:*:*"),
        ([b"wrfrst_d01_2026-01-30_00:00:00", b"wrfrst_d01_2026-02-01_12:00:00"], b"wrfrst_d01_*-*-*_*:*:*"),
        ([b"case.cpl.r.0001-01-06-00000.nc", b"case.cpl.r.0002-12-06-43200.nc"], b"case.cpl.r.*-*-*-*.nc"),
        ([b"model2_20260102_100000.pt", b"model2_20260102_120000.pt", b"model2_20260103_090000.pt"], b"model2_*_*.pt"),
        ([b"case_20260102.060000.nc", b"case_20260102.120000.nc", b"case_20260103.000000.nc"], b"case_*.*.nc"),
        ([b"restart.2026-01-02T10-00-00", b"restart.2026-01-03T09-30-00"], b"restart.*-*-*T*-*-*"),
        ([b"epoch_1_2026-01-02", b"epoch_2_2026-01-02"], b"epoch_*_*-*-*"),
        ([b"ep0-ba50-rank0.pt", b"ep0-ba50-rank1.pt", b"latest-rank0.pt", b"latest-rank1.pt"], b"ep*-ba*-rank0.pt"),
        # Ranks of a bare number; of an epoch it counts steps, and a decimal is none.
        ([b"ckpt_%d_%d.bin" % (step, rank) for step in (100, 200) for rank in range(4)], b"ckpt_*_0.bin"),
        ([b"ckpt_100_0.bin", b"ckpt_100_1.bin", b"ckpt_100_2.bin", b"ckpt_200_2.bin"], b"ckpt_*_0.bin"),
        ([b"ckpt_100_0.bin", b"ckpt_100_2.bin"], b"ckpt_*_0.bin"),
        ([b"ckpt_%d_%d.bin" % (step, rank) for step in (1, 2) for rank in (1, 2, 3)], b"ckpt_*_1.bin"),
        ([b"snapshot_001.0.hdf5", b"snapshot_001.1.hdf5", b"snapshot_002.0.hdf5"], b"snapshot_*.0.hdf5"),
        ([b"checkpoint_1_500.pt", b"checkpoint_1_1000.pt", b"checkpoint_2_1500.pt"], b"checkpoint_*_*.pt"),
        ([b"checkpoint_1_1.pt", b"checkpoint_1_2.pt", b"checkpoint_2_3.pt"], b"checkpoint_*_*.pt"),
        ([b"checkpoint_1_1.pt", b"checkpoint_1_2.pt"], b"checkpoint_*_*.pt"),
        ([b"epoch_1_0.pt", b"epoch_1_1.pt", b"epoch_2_0.pt", b"epoch_2_1.pt"], b"epoch_*_*.pt"),
        ([b"ckpt-1.0", b"ckpt-1.1", b"ckpt-2.0"], b"ckpt-*.*"),
        (
            [b"gpt--val_loss=5.40-step=20-samples=160.0.ckpt", b"gpt--val_loss=5.40-step=20-samples=160.0-last.ckpt"],
            b"gpt--val_loss=*.*-step=*-samples=*.*.ckpt",
        ),
    ],
)
def test_the_series_of_a_directory(names: list[bytes], name: bytes) -> None:
    """T5: the number that counts, wherever it stands."""
    assert found(names) == [name]
    members = list_members(patterns.list_series(names)[0], names)
    assert members and all(member(one.entry, *names) == name for one in members if one.entry in names)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], []),
        ([b"a", b"b"], []),
        ([b"__0_0.distcp", b"__1_0.distcp", b"model-00001-of-00002.safetensors", b"Rank_0.pt", b"Rank_1.pt", b"shard3"], []),
        ([b"model.safetensors", b"rng_state_0.pth", b"rng_state_1.pth", b"random_states_0.pkl"], []),
        ([b"processor0", b"processor1"], []),
        ([b"qwen2-0.5b_step1", b"qwen2-1.5b_step1"], [b"qwen2-0.5b_step*", b"qwen2-1.5b_step*"]),
        ([b"llama3-7b_step100", b"llama3-13b_step100"], [b"llama3-13b_step*", b"llama3-7b_step*"]),
        ([b"a1", b"a2", b"b1", b"b2"], [b"a*", b"b*"]),
        ([b"a1", b"b1"], [b"a*", b"b*"]),
        ([b"x1y1", b"x1y2", b"x2y1"], [b"x*y1", b"x1y*"]),
        ([b"step_base", b"step_0", b"step_100"], [b"step_*"]),
        ([b"ckpt_base.pt", b"ckpt_0.pt", b"ckpt_1.pt"], [b"ckpt_*.pt"]),
        # Experiments and replicas are told apart, not ordered.
        ([b"exp1", b"exp2"], []),
        ([b"rep1", b"rep2", b"run_3", b"seed42"], []),
        ([b"llama3-8b_step100", b"llama4-8b_step100"], [b"llama3-8b_step*", b"llama4-8b_step*"]),
        ([b"pp1_ep4_step900", b"pp1_ep8_step100"], [b"pp1_ep4_step*", b"pp1_ep8_step*"]),  # Ranks that share experts.
        ([b"exp1_step100", b"exp1_step200", b"exp2_step300"], [b"exp1_step*", b"exp2_step*"]),
        ([b"step100_rank0.pt", b"step100_rank1.pt"], [b"step*_rank0.pt"]),
        ([b"iter_0000010_1_local.pt", b"iter_0000010_0_local.pt", b"iter_0000020_0_local.dirty.pt"], [b"iter_*_0_local.pt"]),
        # The parts of one set are no series of their own: Cactus, VeloC.
        ([b"checkpoint.chkpt.it_8.file_0.h5", b"checkpoint.chkpt.it_8.file_1.h5"], [b"checkpoint.chkpt.it_*.file_0.h5"]),
        ([b"heat-0-10.dat", b"heat-1-10.dat"], [b"heat-0-*.dat"]),
        ([b"heat-0-10.dat", b"heat-1-10.dat", b"heat-0-20.dat", b"heat-1-20.dat"], [b"heat-0-*.dat"]),
        ([b"model--step=100.ckpt", b"model--step=200.ckpt", b"model--step=200-unfinished"], [b"model--step=*.ckpt"]),
        ([b"step_100", b"other_1", b"other_2"], [b"other_*", b"step_*"]),
        # One name of several alike is no smaller a series: it may be the newest.
        ([b"a1_b5.pt", b"a1_b6.pt", b"a2_b7.pt"], [b"a1_b*.pt", b"a2_b*.pt"]),
        ([b"exp1_7.pt", b"exp1_8.pt", b"exp2_9.pt", b"args1.yaml"], [b"exp1_*.pt", b"exp2_*.pt"]),
    ],
)
def test_none_or_several(names: list[bytes], expected: list[bytes]) -> None:
    """T5: what would mix experiments is no series."""
    assert found(names) == expected


def test_a_name_alone() -> None:
    assert member(b"llama3-8b_step100") == b"llama3-8b_step*"
    assert member(b"llama3-8b_step100", b"llama4-8b_step100") == b"llama3-8b_step*"
    assert member(b"model") is None
    assert member(b"state_prev.cpt", b"state.cpt") == b"state.cpt"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (b"step_*", (b"step_", b"")),
        (b"*", (b"", b"")),
        (b"a*.pt", (b"a", b".pt")),
        (b"a*b*", (b"a", b"b", b"")),
        (b"*-*", (b"", b"-", b"")),
        (b"step", None),
        (b"a**", None),
    ],
)
def test_a_name_with_the_numbers_left_out(text: bytes, parts: tuple[bytes, ...] | None) -> None:
    assert patterns.parse(text) == (None if parts is None else Series(parts))


def test_numbers() -> None:
    one = Series((b"a1", b"1b"))
    names = {b"a121b": (2,), b"a11b": None, b"a1b": None, b"a1x1b": None, b"a1-51b": None, "a1\N{ARABIC-INDIC DIGIT TWO}1b".encode(): None}
    assert {name: one.parse_numbers(name) for name in names} == names


@pytest.mark.parametrize(
    ("pattern", "counts"),
    [
        (b"step_*", True),
        (b"CHECKPOINT_DIR_step*", True),
        (b"Epoch=*", True),
        (b"ckpt-*", True),
        (b"run*", False),
        (b"*", False),
        (b"steps of run*", False),
        (b"melt.*.restart", True),
        (b"run-*.restart", False),
        (b"*.restart", False),
    ],
)
def test_which_numbers_count_steps(pattern: bytes, counts: bool) -> None:
    one = patterns.parse(pattern)
    assert one is not None and one.is_step_count == counts


def names_in_order(pattern: bytes, names: list[bytes]) -> list[bytes]:
    one = patterns.parse(pattern)
    assert one is not None
    return [found.name for found in list_members(one, names)]


def test_names_of_groups() -> None:
    """H2, H4: what a program is given to restart, and the files that belong to it."""
    lammps = [b"melt.0.100", b"melt.1.100", b"melt.base.100"]
    assert names_and_files(b"melt.%.*", lammps) == [(b"melt.%.100", lammps)]
    assert patterns.find_series(b"melt.1.100", lammps) == patterns.parse(b"melt.%.*")
    dmtcp = [b"ckpt_a.out_e7-40000-2e.dmtcp", b"ckpt_a.out_e7-40000-2e_files", b"dmtcp_restart_script_e7-40000-2d.sh"]
    one = patterns.find_series(dmtcp[0], [*dmtcp, b"dmtcp_restart_script.sh", b"a.out"])
    assert one == Series((b"dmtcp_restart_script.sh",)) and one.is_step_count
    assert list_members(one, [*dmtcp, one.name]) == [((1,), one.name, one.name, tuple(sorted([*dmtcp, one.name])), False, False)]
    assert list_patterns(lammps) == [b"melt.0.*", b"melt.1.*", b"melt.base.*"] and list_patterns(dmtcp) == [one.name]


def names_and_files(pattern: bytes, names: list[bytes]) -> list[tuple[bytes, list[bytes]]]:
    one = patterns.parse(pattern)
    assert one is not None
    return [(found.name, list(found.files)) for found in list_members(one, names)]


def test_newest_first() -> None:
    names = [b"s9", b"s10", b"s0010", b"s1", b"other", b"s2.tmp"]
    for order in itertools.permutations(names):
        assert names_in_order(b"s*", list(order)) == [b"s10", b"s0010", b"s9", b"s1"]


def test_two_numbers() -> None:
    """T5: the epoch decides, then the step; bare numbers count from the left."""
    names = [b"epoch=1-step=20.ckpt", b"epoch=2-step=5.ckpt", b"epoch=1-step=3.ckpt"]
    assert names_in_order(b"epoch=*-step=*.ckpt", names) == [b"epoch=2-step=5.ckpt", b"epoch=1-step=20.ckpt", b"epoch=1-step=3.ckpt"]
    names = [b"iter_200_epoch_2.pth", b"iter_900_epoch_1.pth", b"iter_100_epoch_2.pth"]
    assert names_in_order(b"iter_*_epoch_*.pth", names) == [b"iter_200_epoch_2.pth", b"iter_100_epoch_2.pth", b"iter_900_epoch_1.pth"]
    names = [b"ep1-ba900-rank0.pt", b"ep2-ba1000-rank0.pt", b"ep2-ba200-rank0.pt"]
    assert names_in_order(b"ep*-ba*-rank0.pt", names) == [names[1], names[2], names[0]]
    assert names_in_order(b"*", [b"0.1", b"0.15", b"10", b"0.2", b"9.75"]) == [b"10", b"9.75", b"0.2", b"0.15", b"0.1"]
    names = [b"r_2026-01-31_00", b"r_2026-02-01_06", b"r_2026-02-01_12", b"r_2025-12-31_18"]
    assert names_in_order(b"r_*-*-*_*", names) == [names[2], names[1], names[0], names[3]]
    one = patterns.parse(b"epoch=*-step=*.ckpt")
    assert one is not None and one.parse_numbers(b"epoch=2-step=5.ckpt") == (5, 2), "the step is shown"
    assert names_in_order(b"*-*", [b"1-20", b"2-3", b"1-100"]) == [b"2-3", b"1-100", b"1-20"]
    names = [b"step=9-v2.ckpt", b"step=10.ckpt", b"step=9.ckpt", b"step=9-v1.ckpt"]
    assert names_in_order(b"step=*.ckpt", names) == [b"step=10.ckpt", b"step=9-v2.ckpt", b"step=9-v1.ckpt", b"step=9.ckpt"]


def test_files_of_one_member() -> None:
    """T5: parts belong together, experiments do not; TensorFlow restores from the prefix (H4)."""
    names = [b"step1_rank0.pt", b"step1_rank1.pt", b"step2_rank0.pt"]
    one = patterns.parse(b"step*_rank0.pt")
    assert one is not None
    assert [found.files for found in list_members(one, names)] == [(names[2],), (names[0], names[1])]
    index, data = b"ckpt-2.index", b"ckpt-2.data-00000-of-00001"
    for pattern, entry in ((b"ckpt-*", b"ckpt-2"), (b"ckpt-*.index", index)):
        one = patterns.parse(pattern)
        assert one is not None
        assert list_members(one, [index, data, b"checkpoint"]) == [((2,), b"ckpt-2", entry, (data, index), False, False)]
    assert list_patterns([index, data, b"ckpt-1.index"]) == [b"ckpt-*.data-00000-of-00001", b"ckpt-*.index"]
    assert list_patterns([b"step_1", b"run.cpt"]) == [b"run.cpt", b"step_*"]


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        (b"step*_rank*.pt", b"step%d_rank%d.pt", b"step*_rank0.pt"),
        (b"step*_rank1.pt", b"step%d_rank%d.pt", b"step*_rank1.pt"),
        (b"ckpt_*_*.bin", b"ckpt_%d_%d.bin", b"ckpt_*_0.bin"),
        (b"epoch_*_*.bin", b"epoch_%d_%d.bin", b"epoch_*_*.bin"),
    ],
)
def test_a_pattern_with_a_star_for_each_rank(pattern: bytes, name: bytes, expected: bytes) -> None:
    """T5: it means the series, of which a member is named once and has all ranks."""
    names = {name % (step, rank) for step in (100, 200) for rank in range(3)}
    one = patterns.parse(pattern)
    assert one is not None
    one = patterns.choose_part(one, names)
    assert one.name == expected
    assert [len(found.files) for found in list_members(one, names)] == [3, 3] or b"epoch" in name


@pytest.mark.parametrize(
    ("pattern", "names", "expected"),
    [
        (b"epoch=*-step=*.ckpt", [b"last.ckpt", b"last-v1.ckpt", b"last.pt", b"best.ckpt", b"elast.ckpt"], [b"last-v1.ckpt", b"last.ckpt"]),
        (b"checkpoint_*_*.pt", [b"checkpoint_last.pt", b"checkpoint_best.pt", b"other_last.pt"], [b"checkpoint_last.pt"]),
        (b"checkpoint-*.pth.tar", [b"last.pth.tar", b"model_best.pth.tar"], [b"last.pth.tar"]),
        (b"G_*.pth", [b"D_latest.pth", b"G_latest.pth"], [b"G_latest.pth"]),
        (b"global_step*", [b"latest", b"last"], []),
    ],
)
def test_names_of_the_newest_state(pattern: bytes, names: list[bytes], expected: list[bytes]) -> None:
    one = patterns.parse(pattern)
    assert one is not None and find_last_names(one, names) == expected


@pytest.mark.parametrize(
    ("name", "temporary"),
    [
        (b"tmp-checkpoint-20", True),
        (b"ckpt_1.pt.tmp", True),
        (b".metadata.tmp", True),
        (b"100.orbax-checkpoint-tmp-17", True),
        (b"step_1.partial", True),
        (b"#state.cpt.1#", True),
        (b".tmp.step_5", True),
        (b"step_5.tmp.1234", True),
        (b"step_5~", True),
        (b"ckpt_a.out_1.dmtcp.temp", True),
        (b"ckpt-1.data-00000-of-00001.tempstate123", True),
        (b"ckpt-1_temp", True),
        (b"iter_0000020_0_local.dirty.pt", True),
        (b"PROJ-1.restart.bak-2", True),
        (b"temp_300.restart", False),
        (b"Xtmp", False),
        (b"x.ckptfs-conflict-node2-1", True),
        (b"tmpfs_100", False),
        (b"attempt_7", False),
        (b"template_1.pt", False),
        (b"temperature_300.restart", False),
        (b"step_100", False),
    ],
)
def test_temporary_names(name: bytes, temporary: bool) -> None:
    """N7: what a program has not finished is no member."""
    assert is_temporary(name) == temporary


@pytest.mark.parametrize(
    ("path", "place"),
    [
        (b"run1/step_100/rank_3.pt", b"run1/step_*/rank_3.pt"),
        (b"a/100/model-00001-of-00004.bin", b"a/*/model-00001-of-00004.bin"),
        (b"a/100/__0_0.distcp", b"a/*/__0_0.distcp"),
        (b"a/100/__1_0.distcp", b"a/*/__1_0.distcp"),
        (b"iter_0001000/mp_rank_00_000/model.pt", b"iter_*/mp_rank_00_000/model.pt"),
        (b"7/rank0.pt", b"*/rank0.pt"),
        (b"global_step7/zero_pp_rank_1_mp_rank_00_optim_states.pt", b"global_step*/zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        (b"model_100.pt", b"model_*.pt"),
        (b"x/7.bin", b"x/*.bin"),
        (b"notes", b"notes"),
    ],
)
def test_the_place_of_a_file_in_each_checkpoint(path: bytes, place: bytes) -> None:
    """X1: files of one place have about one size; the next one is prepared by it."""
    assert patterns.get_place(path) == place


def test_the_pattern_that_was_meant() -> None:
    def meant(pattern: bytes, *names: bytes) -> list[bytes]:
        return [one.name for one in suggest_series(pattern, names)]

    assert meant(b"step_*", b"step_100.pt", b"other_1") == [b"step_*.pt"]
    assert meant(b"epoch=*.ckpt", b"epoch=1-step=200.ckpt") == [b"epoch=*-step=*.ckpt"]
    assert meant(b"stpe_*", b"step_100.pt") == [b"step_*.pt"]
    assert meant(b"step_*") == []


@pytest.mark.parametrize(
    "build",
    [
        lambda number: b"step_%d" % number,
        lambda number: b"epoch=%d-step=%d.ckpt" % (number // 100, number),
        lambda number: b"step%d_rank%d.pt" % (number // 4, number % 4),
        lambda number: b"ckpt-%d%s" % (number // 2, (b".index", b".data-00000-of-00001")[number % 2]),
        lambda number: b"melt.%s.%d" % ((b"base", b"0", b"1", b"2")[number % 4], number // 4),
        lambda number: b"a%d_b%d" % (number, number * 7),
        lambda number: f"{number:x}".translate(str.maketrans("0123456789", "ghijklmnop")).encode() + b"_1",
    ],
)
def test_ten_thousand_names(build: Callable[[int], bytes]) -> None:
    """N2: the time grows with the number of names, not with its square, also if each name is a series of its own."""
    names = [build(number) for number in range(10_000)]
    begun = time.process_time()
    assert patterns.list_series(names) and list_patterns(names)
    one = patterns.find_series(names[-1], names)
    assert one is not None and list_members(one, names)
    assert time.process_time() - begun < 10, "half a second on an idle machine; the square takes minutes"
