"""N4, P3: fsync=clique."""

import contextlib
import errno
import os
from collections.abc import Callable

import pytest
from cluster_lab import ClusterUnderTest, limited

SIZE = 9_000_000


def test_fsync_waits_for_the_clique(make_lab: Callable[..., ClusterUnderTest]) -> None:
    """N4: with fsync=clique it returns when the copy is there; alone it fails with a clear error within its time."""
    cluster = make_lab(nodes=2, fsync="clique", clique_wait="3s", with_pfs=False)
    cluster.expect_warning("does not answer|has died|is gone|not reach|cannot be reached|lost|took over|no longer|no peer")
    durable = False
    with limited(cluster):
        # Its mount is gone when it is closed.
        with contextlib.suppress(OSError), open(cluster[0].path / "file", "wb") as file:
            file.write(b"x" * SIZE)
            os.fsync(file.fileno())
            durable = True
            cluster[0].wipe(nvme=True)
        assert durable
        assert (cluster[1].path / "file").read_bytes() == b"x" * SIZE
        with open(cluster[1].path / "alone", "wb") as file:
            file.write(b"x")
            with pytest.raises(OSError) as failure:
                os.fsync(file.fileno())
        assert failure.value.errno in (errno.EIO, errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EAGAIN)
