"""A history of checkpoint sets as plain directories, and a client that answers as the daemon would: for tests of commands without FUSE."""

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ckptfs_client.mounts import HISTORY, Mount
from ckptfs_client.sets.set_history import SetHistory

from ckptfs.digest import RunningDigest
from ckptfs.protocol import control_pb2 as pb
from ckptfs.series.set_order import build_set_order

LAST_NS = 1_700_000_000_000_000_000


@dataclass
class HistoryDirectory:
    """Series and sets below `root`, which stands for the mountpoint. Files of sets are hard links."""

    root: Path
    is_public: bool = True
    rollback: int = 0
    series: dict[str, pb.SeriesInfo] = field(default_factory=dict)
    sets: dict[int, list[pb.SetInfo]] = field(default_factory=dict)

    def add(self, series: str, name: str, files: dict[str, bytes], **more: object) -> Path:
        """Write a member and make a set of it; its directory in the history."""
        place = self.root / os.path.dirname(series)
        history = self.root / HISTORY / series
        history.mkdir(parents=True, exist_ok=True)
        info = self.series.setdefault(series, pb.SeriesInfo(directory=history.stat().st_ino))
        sets = self.sets.setdefault(info.directory, [])
        made = history / f"{name}@{len(sets) + 1}"
        entries = []
        for path, data in files.items():
            own = place / path if more.get("group") else place / name / path
            own.parent.mkdir(parents=True, exist_ok=True)
            own.unlink(missing_ok=True)
            own.write_bytes(data)
            (made / path).parent.mkdir(parents=True, exist_ok=True)
            os.link(own, made / path)
            digest = RunningDigest()
            digest.update(data)
            entries.append({"path": path, "size": len(data), "mtime_ns": 0, "digest": digest.finish()[0].hex()})
        producers = [{"host": "node1", "pid": 7, "command": "python train.py", "job": "99", "rank": "0"}]
        (made / "MANIFEST.json").write_text(json.dumps({"format": 1, "files": entries, "producers": producers}))
        (made / "MANIFEST.xxh128").write_text("")
        values: dict[str, object] = {"level": "local", "in_place": True, "completed_ns": LAST_NS, **more}
        size = sum(map(len, files.values()))
        step = re.sub(r"[^0-9]", "", name)
        sets.insert(0, pb.SetInfo(number=len(sets) + 1, name=os.fsencode(name), files=len(files), size=size, step=step, **values))
        return made

    def open(self) -> SetHistory:
        """The history as a command sees it."""
        mount = Mount("test", self.root, os.geteuid(), self.root.stat().st_dev)
        return SetHistory(mount, self, figures=True)  # type: ignore[arg-type]

    # --- what commands use of `Client` --------------------------------------------------------------------------------

    def list_series(self, *, figures: bool = False) -> pb.ListSeriesReply:
        reply = pb.ListSeriesReply()
        for path, one in self.series.items():
            origin = (self.root / path).parent
            pattern = os.path.basename(path).partition("~")[0]
            info = pb.SeriesInfo(
                directory=one.directory, origin=origin.stat().st_ino if origin.exists() else 0, path=os.fsencode(path),
                pattern=os.fsencode(pattern), rollback=self.rollback,
            )  # fmt: skip
            if not self.is_public:
                info.path = info.pattern = b""
            if figures:
                sets = self.list_sets(one.directory)
                info.sets, info.size = len(sets), sum(each.size for each in sets)
                info.newest.CopyFrom(sets[0])
            reply.series.append(info)
        return reply

    def list_sets(self, directory: int, at_least: int | None = None) -> list[pb.SetInfo]:
        pattern = next(os.path.basename(path).partition("~")[0] for path, one in self.series.items() if one.directory == directory)
        get_order = build_set_order(os.fsencode(pattern), self.rollback or None)
        ordered = sorted(self.sets[directory], key=lambda one: get_order(one.name, one.number), reverse=True)[:at_least]
        found = [pb.SetInfo.FromString(one.SerializeToString()) for one in ordered]
        if not self.is_public:
            for one in found:
                one.noted, one.name, one.note = bool(one.note), b"", ""
        return found

    def list_records(self, inodes: Iterable[int], *, trees: bool = False) -> list[pb.Record]:
        return [pb.Record(inode=inode, known=True, level="local", mode=0o100640) for inode in inodes]

    def close(self) -> None:
        """Nothing is open."""
