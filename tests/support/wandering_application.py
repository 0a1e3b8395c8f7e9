"""An application of campaigns that no real program is like: a different node writes each time."""

import errno
import threading
import time
from pathlib import Path

from ckptfs_client.chaos.applications import Application, Gromacs, Small, Torch, Track, build_version

BUSY_S = 30.0


class Wandering(Application):
    """Two files that a different node writes each time, in place and by rename.

    A node that comes back has older ones.
    """

    def build_tracks(self, name: str) -> list[Track]:
        self.whole, self.aside = Track(f"{name}/whole", f"{name}/whole"), Track(f"{name}/aside", f"{name}/best")
        return [self.whole, self.aside]

    def begin(self, root: Path) -> None:
        super().begin(root)
        for track in self.tracks:
            self.expect(track, self.found(track, root.parent / track.path))

    def turn(self, root: Path) -> None:
        if self.source.random() < 0.3:
            self.step(self.whole, lambda number: self._over(root / "whole", build_version(self.whole.origin, number)))
        else:
            self.step(self.aside, lambda number: self._aside(root, number))
        present = [found for found in range(len(self.campaign.cluster.nodes)) if found not in self.campaign.away]
        self.node = self.source.choice([found for found in present if found != self.node] or present or [self.node])

    def _aside(self, root: Path, number: int) -> None:
        self.put(root / f"aside.{self.node}", build_version(self.aside.origin, number))
        (root / f"aside.{self.node}").rename(root / "aside")

    def _over(self, path: Path, data: bytes) -> None:
        """Write in place.

        That is refused as long as a reader on this node has an older version of another node open.
        """
        until = time.monotonic() + BUSY_S
        while True:
            try:
                self.put(path, data)
                return
            except OSError as failure:
                if failure.errno != errno.EBUSY or time.monotonic() > until:
                    raise
                threading.Event().wait(0.02)


ALL_KINDS = (Gromacs, Wandering, Torch, Small, Wandering)
