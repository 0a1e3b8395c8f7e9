"""G1: which files a drain with too little time brings to safety first, and what it says at the end."""

from collections.abc import Collection
from dataclasses import dataclass

import pytest

from ckptfs.protocol import control_pb2 as pb
from ckptfs.series.patterns import Member
from ckptfs.series.urgency import (
    Path,
    SeriesIndex,
    choose_order,
    is_whole,
    list_safety_lines,
    list_unsafe_members,
)


@dataclass(frozen=True)
class File:
    """A file that is not safe."""

    name: str
    inode: int
    size: int
    is_open: bool
    path: Path


class Tree:
    """Files by path; directories are numbered as they appear."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {"": 1}
        self.names: dict[int, dict[bytes, None]] = {1: {}}
        self.files: list[File] = []

    def add(self, path: str, size: int = 10, *, is_open: bool = False, is_safe: bool = False) -> None:
        steps: list[tuple[int, bytes]] = []
        above = ""
        for name in path.split("/"):
            directory = self.numbers.setdefault(above, len(self.numbers) + 1)
            self.names.setdefault(directory, {})[name.encode()] = None
            steps.append((directory, name.encode()))
            above = f"{above}/{name}" if above else name
        if not is_safe:
            self.files.append(File(path, 100 + len(self.files), size, is_open, tuple(steps)))

    def list_names(self, directory: int) -> Collection[bytes]:
        return self.names[directory]

    def count_files(self, directory: int, member: Member) -> int:
        path = next(path for path, number in self.numbers.items() if number == directory)
        roots = [f"{path}/{name.decode()}" if path else name.decode() for name in member.files]
        return sum(len(self.names[self.numbers[root]]) if root in self.numbers else 1 for root in roots)

    def order(self) -> list[list[str]]:
        index = SeriesIndex(self.list_names)
        members, loose = list_unsafe_members(self.files, index)
        _, groups = choose_order(members, loose, lambda one: is_whole(one, index, self.count_files))
        names = {file.inode: file.name for file in self.files}
        return [[names[inode] for inode in group] for group in groups]


def test_the_newest_whole_member_of_each_series_comes_first_and_the_smallest_of_them_before_the_others() -> None:
    tree = Tree()
    for run, size in (("big", 100), ("small", 10)):
        for step in (100, 200, 300):
            for name in ("a.pt", "b.pt"):
                tree.add(f"{run}/step_{step}/{name}", size)
    assert [group[0].rpartition("/")[0] for group in tree.order()] == [
        "small/step_300", "big/step_300", "small/step_200", "big/step_200", "small/step_100", "big/step_100",
    ]  # fmt: skip
    assert tree.order()[0] == ["small/step_300/a.pt", "small/step_300/b.pt"]


def test_a_member_that_is_still_written_comes_after_those_that_are_nearly_safe() -> None:
    tree = Tree()
    for step in (100, 200):
        for name in ("a.pt", "b.pt"):
            tree.add(f"run/step_{step}/{name}")
    tree.add("run/step_300/a.pt", size=1)
    tree.add("run/step_300/b.pt", is_open=True)
    tree.add("other/epoch_1.pt", size=1000)
    assert [group[0] for group in tree.order()] == [
        "run/step_200/a.pt", "other/epoch_1.pt", "run/step_300/a.pt", "run/step_100/a.pt",
    ]  # fmt: skip


def test_a_member_with_fewer_files_than_the_one_before_it_is_not_whole() -> None:
    tree = Tree()
    for step in (100, 200):
        for name in ("a.pt", "b.pt"):
            tree.add(f"run/step_{step}/{name}", is_safe=step == 100)
    tree.add("run/step_300/a.pt")
    assert [group[0] for group in tree.order()] == ["run/step_200/a.pt", "run/step_300/a.pt"]


def test_few_bytes_missing_of_a_large_member_come_before_a_small_one() -> None:
    tree = Tree()
    for name in ("a.pt", "b.pt"):
        tree.add(f"large/step_1/{name}", 1000, is_safe=name == "a.pt")
        tree.add(f"small/step_1/{name}", 600)
    assert [group[0] for group in tree.order()] == ["large/step_1/b.pt", "small/step_1/a.pt"]


@pytest.mark.parametrize(
    ("names", "group"),
    [
        (["global_step5/zero_pp_rank_0.pt", "global_step5/zero_pp_rank_1.pt"], 2),
        (["checkpoint-5/model.safetensors", "checkpoint-5/rng_state_0.pth", "checkpoint-5/rng_state_1.pth"], 3),
        (["iter_0000005/mp_rank_00/model.pt", "iter_0000005/mp_rank_01/model.pt"], 2),
        (["step_5-rank0.pt", "step_5-rank1.pt"], 2),
        (["ckpt-5.index", "ckpt-5.data-00000-of-00001"], 2),
        (["epoch_1/step_5.pt", "epoch_1/step_6.pt"], 1),
    ],
)
def test_files_that_are_one_member_are_one_group(names: list[str], group: int) -> None:
    tree = Tree()
    for name in names:
        tree.add(f"run/{name}")
    tree.add("run/notes.txt")
    assert len(tree.order()[0]) == group
    assert tree.order()[-1] == ["run/notes.txt"]


def test_files_of_no_series_come_last_and_in_their_order() -> None:
    tree = Tree()
    for name in ("state.json", "readme", "step_7.pt", "tmp-step_8.pt"):
        tree.add(name)
    assert tree.order() == [["step_7.pt"], ["state.json", "readme", "tmp-step_8.pt"]]


def test_the_report_says_what_is_safe_and_what_is_not() -> None:
    safe = pb.SeriesSafety(
        series="run1/step_*", name="step_300", level="clique", safe=True, files=8, bytes=4096, safe_name="step_300", safe_level="clique"
    )
    lost = pb.SeriesSafety(
        series="run2/step_*", name="step_90", level="local", files=4, bytes=4096, missing_files=3, missing_bytes=2048, open_files=1,
        safe_name="step_80", safe_level="pfs",
    )  # fmt: skip
    first = pb.SeriesSafety(series="run3/step_*", name="step_1", level="local", files=1, bytes=10, missing_files=1, missing_bytes=10)
    safety = pb.Safety(level="pfs", series=(safe, lost, first), other_files=2, other_bytes=10, open_files=3, secured_files=1)
    assert list_safety_lines(safety) == [
        "run1/step_*: step_300 is safe (clique): 8 files, 4.0 KiB",
        "run2/step_*: step_90 is NOT safe (local): 3 of 4 files missing (2.0 KiB of 4.0 KiB), 1 file still open; "
        "the newest safe one is step_80 (pfs)",
        "run3/step_*: step_1 is NOT safe (local): 1 of 1 file missing (10 B of 10 B); no older one is safe",
        "2 other files (10 B) not at the level pfs",
        "3 open files: 1 secured on other nodes",
    ]
    assert list_safety_lines(pb.Safety(level="pfs")) == []
