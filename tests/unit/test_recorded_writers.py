"""What real programs did in a directory of checkpoints, event by event, with a kill anywhere: N7, D3, D6, D15, T5, T6, H4.

`tests/data/writers/record.py` recorded it. A member may be found only while it has all the bytes that it has at its end.
"""

import base64
import errno
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from series_tree import OLD_NS, Result, SeriesTree, TreeFile

from ckptfs.series.file_formats import FileFormat
from ckptfs.series.pickle_scan import ReadRange
from ckptfs.series.set_kinds import MemberFile

WRITERS = Path(__file__).parents[1] / "data" / "writers"
PATTERNS = {
    "transformers": "checkpoint-*", "transformers-2-ranks": "checkpoint-*", "lightning": "epoch=*-step=*.ckpt", "orbax": "*",
    "tensorflow": "ckpt-*", "deepspeed-zero-1": "global_step*", "deepspeed-zero-3": "global_step*",
}  # fmt: skip
NEWEST = {
    "transformers": "checkpoint-4", "transformers-2-ranks": "checkpoint-4", "lightning": "epoch=0-step=4-v1.ckpt", "orbax": "300",
    "tensorflow": "ckpt-3", "deepspeed-zero-1": "global_step2", "deepspeed-zero-3": "global_step2",
}  # fmt: skip
CUTS = 6
Event = list[str]
Files = dict[bytes, TreeFile]


def load(name: str) -> list[Event]:
    found: list[Event] = json.loads((WRITERS / f"{name}.json").read_text())["events"]
    return found


def replay(files: Files, event: Event, number: int, cut: float = 1.0) -> Files:
    """The files after an event. A write that is cut ended with a kill: the kernel closed the file."""
    what, path, *rest = event
    name, found = path.encode(), dict(files)
    if what == "write":
        data = zlib.decompress(base64.b85decode(rest[0]))
        found[name] = TreeFile(data[: int(cut * len(data))], OLD_NS + number)
    elif what == "rename":
        target = rest[0].encode()
        # Some programs rename what they have open: then it is sealed later, at the close.
        moved = {one: file for one, file in files.items() if (one + b"/").startswith(name + b"/")} or {
            name: TreeFile(b"", reason="is not sealed yet")
        }
        found = {one: file for one, file in files.items() if one not in moved}
        found |= {target + one.removeprefix(name): file for one, file in moved.items()}
    elif what == "remove":
        found.pop(name, None)
    return found


def take(files: Files, member: str) -> dict[bytes, bytes]:
    """What a member has: files below it, or with its name as their prefix."""
    name = member.encode()
    return {path: file.data for path, file in files.items() if path == name or path.startswith((name + b"/", name + b"."))}


@dataclass
class Replay:
    """A recording: the files after each event, and what each member has when it is whole."""

    name: str
    events: list[Event]
    states: list[Files]

    @classmethod
    def of(cls, name: str, events: list[Event]) -> "Replay":
        states: list[Files] = [{}]
        for number, event in enumerate(events, 1):
            states.append(replay(states[-1], event, number))
        return cls(name, events, states)

    def find(self, files: Files, age_s: float) -> str:
        return SeriesTree(files, age_s).find(PATTERNS[self.name]) if files else ""

    def is_whole(self, files: Files, member: str) -> bool:
        """Whether a member is as it is after the last event that gave it anything."""
        last = max(number for number, event in enumerate(self.events, 1) if event[0] != "remove" and take_names(event, member))
        return take(files, member) == take(self.states[last], member)

    def list_kills(self) -> Iterator[tuple[str, Files]]:
        """Each state in which a kill may leave the directory: between two events, and within each write."""
        for number, event in enumerate(self.events, 1):
            before = self.states[number - 1]
            for part in range(CUTS) if event[0] == "write" else ():
                yield f"{number}: {event[:2]} cut {part}/{CUTS}", replay(before, event, number, part / CUTS)
            yield f"{number}: {event[:2]}", self.states[number]


def take_names(event: Event, member: str) -> bool:
    """Whether an event is about a member."""
    names = event[1:2] if event[0] == "write" else event[1:]
    return any(name == member or name.startswith((member + "/", member + ".")) for name in names)


@pytest.mark.parametrize("name", list(PATTERNS))
def test_no_kill_makes_a_wrong_checkpoint(name: str) -> None:
    """N7, D6: asked at once or after an hour; at the end the newest is found."""
    recorded = Replay.of(name, load(name))
    for age_s in (0.0, 3600.0):
        for what, files in recorded.list_kills():
            found = recorded.find(files, age_s)
            assert not found or recorded.is_whole(files, found), f"{what}, after {age_s:.0f} s: {found}"
    assert recorded.find(recorded.states[-1], 0.0) == NEWEST[name]


def is_of_second_rank(event: Event) -> bool:
    return any(mark in event[1] for mark in ("zero_pp_rank_1_", "rng_state_1"))


@pytest.mark.parametrize("name", ["transformers-2-ranks", "deepspeed-zero-1", "deepspeed-zero-3"])
def test_a_rank_that_is_late_or_missing(name: str) -> None:
    """D6, D15: the second rank writes after all that the first one does for a checkpoint; for the last one never."""
    events = load(name)
    begins = max(number for number, event in enumerate(events) if event[0] == "mkdir")
    first, last = (sorted(half, key=is_of_second_rank) for half in (events[:begins], events[begins:]))
    whole, missing = Replay.of(name, [*first, *last]), Replay.of(name, [*first, *(one for one in last if not is_of_second_rank(one))])
    # Nothing tells how many ranks a Trainer has, so its first set counts after a while.
    for age_s in (0.0, 20.0) if name.startswith("transformers") else (0.0, 20.0, 3600.0):
        for what, files in (*whole.list_kills(), *missing.list_kills()):
            found = whole.find(files, age_s)
            assert not found or whole.is_whole(files, found), f"{what}, after {age_s:.0f} s: {found}"
    assert whole.find(whole.states[-1], 60.0) == NEWEST[name]
    assert missing.find(missing.states[-1], 60.0) == NEWEST[name].replace("4", "2").replace("step2", "step1")


def test_a_large_file_of_another_node_is_not_needed() -> None:
    """N2: the file of DeepSpeed's model tells the number of ranks, but only where it is; then names and members before must do."""
    states = Replay.of("deepspeed-zero-1", load("deepspeed-zero-1")).states

    class Elsewhere(SeriesTree):
        async def inspect(self, entry: bytes, name: bytes, file: MemberFile) -> FileFormat:
            return FileFormat("zip")

        async def examine(self, entry: bytes, file: MemberFile, act: Callable[[int, ReadRange], Result]) -> Result:
            raise OSError(errno.ENODATA, "elsewhere")

    assert Elsewhere(states[-1], 60.0).find("global_step*") == "global_step2"
    assert Elsewhere(states[-2], 60.0).find("global_step*") == "global_step1", "the second rank is missing"
