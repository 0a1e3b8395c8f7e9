"""Rules of the configuration for series: names and completeness that programs do not show. P11, T5, D6."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from series_tree import OLD_NS, SeriesTree, TreeFile

from ckptfs import config
from ckptfs.errors import ConfigError
from ckptfs.model import SeriesRule
from ckptfs.series import patterns, rules

X = b"x" * 100
NEWER = OLD_NS + 1


@pytest.fixture(autouse=True)
def no_rules() -> Iterator[None]:
    yield
    rules.install_rules(())


def install(**complete: object) -> None:
    """A rule for members that no other rule takes for checkpoints: the word before the number counts experiments."""
    rules.install_rules([SeriesRule("trial*", **complete)])  # type: ignore[arg-type]


def names(*found: str) -> list[bytes]:
    return [one.encode() for one in found]


def test_what_is_no_series_without_a_rule() -> None:
    """T5: a rule comes before what is known of names, and leaves other names alone."""
    there = names("trial7", "trial8", "state.bin", "step_1", "part_1.dat", "part_2.dat", "part_3.dat.tmp")
    assert [one.name for one in patterns.list_series(there)] == [b"step_*"]
    rules.install_rules([SeriesRule("trial*"), SeriesRule("part_*.dat"), SeriesRule("state.bin"), SeriesRule("unused*")])
    found = {one.name: one for one in patterns.list_series(there)}
    assert sorted(found) == [b"part_*.dat", b"state.bin", b"step_*", b"trial*"] and all(one.is_step_count for one in found.values())
    assert [one.files for one in patterns.list_members(found[b"part_*.dat"], there)] == [(b"part_2.dat",), (b"part_1.dat",)]
    assert [one.entry for one in patterns.list_members(found[b"state.bin"], there)] == [b"state.bin"]
    assert patterns.find_series(b"trial7", there) == found[b"trial*"] and patterns.parse(b"state.bin") == found[b"state.bin"]
    assert patterns.find_series(b"state.bin", there) == found[b"state.bin"]


def test_a_file_inside_that_is_written_last() -> None:
    """D6: it must be there, sealed, and no older than the others."""
    install(last="meta/DONE")
    first = {"trial1/a": X, "trial1/b": X, "trial1/meta/DONE": TreeFile(b"", NEWER)}
    tree = SeriesTree.of({**first, "trial2/a": X})
    assert tree.find("trial*") == "trial1"
    assert tree.find_reasons("trial*") == {"trial2": "meta/DONE is not there yet"}
    assert tree.with_files({"trial2/meta/DONE": TreeFile(b"", NEWER)}).find("trial*") == "trial2", (
        "the rule says that nothing else is missing"
    )
    again = tree.with_files({"trial1/a": TreeFile(X, NEWER + 1)})
    assert again.find_reasons("trial*")["trial1"] == "meta/DONE is older than a: it belongs to the save before"
    unsealed = tree.with_files({"trial1/meta/DONE": TreeFile(b"", NEWER, reason="is not sealed yet")})
    assert unsealed.find("trial*") == "" and tree.with_files({"trial1/c.tmp": X}).find("trial*") == "trial1", "left over"


def test_a_file_beside_that_is_written_last() -> None:
    """D6: it has the number of its member, and is no member itself."""
    install(last="trial*.done")
    tree = SeriesTree.of({"trial007": X, "trial8": X, "trial007.done": TreeFile(b"", NEWER), "trial9.done": b""})
    assert [one.name for one in patterns.list_series(tree.siblings)] == [b"trial*"]
    assert tree.find("trial*") == "trial007" and tree.find_reasons("trial*") == {"trial8": "trial*.done is not there yet"}
    unsealed = tree.with_files({"trial8.done": TreeFile(b"", NEWER, reason="is not sealed yet")})
    assert unsealed.find_reasons("trial*") == {"trial8": "trial*.done is not sealed yet"}
    assert tree.with_files({"trial007": TreeFile(X, NEWER + 1)}).find("trial*") == ""


def test_a_number_of_files() -> None:
    """D6: fewer are not complete, and sizes and names are not compared."""
    install(files=2)
    tree = SeriesTree.of({"trial1/a": X, "trial1/b": X, "trial2/c": b"x"})
    assert tree.find("trial*") == "trial1"
    assert tree.find_reasons("trial*") == {"trial2": "it has 1 files; accepted: 2, as the rule for trial* says"}
    assert tree.with_files({"trial2/d": b"x"}).find("trial*") == "trial2"
    cut = b"PK\x03\x04" + X
    assert "zip directory" in tree.with_files({"trial2/d": cut}).find_reasons("trial*")["trial2"], "what is cut is never complete"


def test_a_quiet_time() -> None:
    """D6: also if there are members before it, and nothing waits for it."""
    install(quiet_s=60.0)
    tree = SeriesTree.of({"trial1/a": X, "trial2/b": X}, age_s=59.0)
    reasons = tree.find_reasons("trial*")
    assert reasons["trial2"] == "it was changed 59 s ago; accepted: 60 s, as the rule for trial* says" and tree.waited_s == 0
    tree.age_s = 60.0
    assert tree.find("trial*") == "trial2"


def test_rules_travel_as_text() -> None:
    some = (SeriesRule("a*", last="DONE"), SeriesRule("b", quiet_s=2.5), SeriesRule("c*", files=3))
    assert rules.decode_rules(rules.encode_rules(some)) == some


# --- the file ---------------------------------------------------------------------------------------------------------


def load(place: Path, text: str) -> tuple[SeriesRule, ...]:
    for name in ("mnt", "state"):
        (place / name).mkdir(exist_ok=True)
    (place / "mount.toml").write_text(text)
    return config.load("job", place / "mnt", {"config": str(place / "mount.toml"), "state": str(place / "state")}).series


def test_tables(tmp_path: Path) -> None:
    text = """
        [[series]]
        pattern = "trial*"
        complete = "DONE"
        [[series]]
        pattern = "state.bin"
        [[series]]
        pattern = "a*b*"
        complete = "a*b*.ok"
        [[series]]
        pattern = "c*"
        complete = 4
        [[series]]
        pattern = "d*"
        complete = "1.5m"
    """
    assert load(tmp_path, text) == (
        SeriesRule("trial*", last="DONE"), SeriesRule("state.bin"), SeriesRule("a*b*", last="a*b*.ok"), SeriesRule("c*", files=4),
        SeriesRule("d*", quiet_s=90.0),
    )  # fmt: skip
    assert load(tmp_path, "") == ()


def test_numbered_files_that_are_no_checkpoints(tmp_path: Path) -> None:
    """T5: as docs/checkpoint-sets.md excludes them: no member ever has a file of this name."""
    text = (Path(__file__).parents[2] / "docs" / "checkpoint-sets.md").read_text()
    array = b"\x93NUMPY\x01\x00\x76\x00" + b"{'descr': '|u1', 'fortran_order': False, 'shape': (100,), }".ljust(117) + b"\n" + X
    tree = SeriesTree.of({"batch_00001.npy": array, "batch_00002.npy": array, "step_1/a": X})
    assert tree.find("batch_*.npy") == "batch_00002.npy"
    table = text[text.index("[[series]]") :].partition("```")[0]
    rules.install_rules(load(tmp_path, table))
    assert tree.find("batch_*.npy") == "" and tree.find("step_*") == "step_1"


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("", "no pattern was given"),
        ('patern = "a*"', "unknown key 'patern'; accepted: pattern, complete"),
        ('pattern = "run/a*"', "names no series; accepted: one name without directories"),
        ('pattern = "a**"', "accepted: one name without directories, with a * for each number"),
        ('pattern = "a?"', "names no series"),
        ('pattern = ""', "names no series"),
        ("pattern = 7", "pattern: 7 names no series"),
        ('pattern = "a*"\ncomplete = 0', "complete: 0 is not a number of files; accepted: the name"),
        ('pattern = "a*"\ncomplete = true', "complete: True does not say when a member is complete; accepted: the name of the file"),
        ('pattern = "a*"\ncomplete = "0s"', "complete: '0s' does not say"),
        ('pattern = "a*"\ncomplete = "../x"', "complete: '../x' does not say"),
        ('pattern = "a*"\ncomplete = "*.*.ok"', "complete: '*.*.ok' does not fit 'a*'"),
        ('pattern = "a*"\ncomplete = "x/*.ok"', "complete: 'x/*.ok' does not fit 'a*'"),
        ('pattern = "a*"\n[[series]]\npattern = "a*"', "series rule 2: 'a*' has a rule already"),
    ],
)
def test_tables_that_are_refused(tmp_path: Path, table: str, words: str) -> None:
    """P11."""
    with pytest.raises(ConfigError, match="series rule") as refused:
        load(tmp_path, f"[[series]]\n{table}\n")
    assert words in str(refused.value)


def test_what_is_no_list_of_tables(tmp_path: Path) -> None:
    """P11."""
    with pytest.raises(ConfigError, match="series: this is not a list of tables"):
        load(tmp_path, "[series]\n")
    with pytest.raises(ConfigError, match="accepted: up to 64"):
        load(tmp_path, "".join(f'[[series]]\npattern = "a{number}*"\n' for number in range(65)))
