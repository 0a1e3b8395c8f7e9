"""G6, in virtual time: what is recorded of a set is recorded before the set goes."""

import random
from typing import Any

import pytest
import trio
from ckptfs_daemon.event_writer import events
from simulated_cluster import SETTLE_S, SimulatedCluster
from simulated_mount import list_history, simulate

from ckptfs.catalog import history, inodes, user_settings
from ckptfs.event_log import EventKind

FILE = "step_1.bin"


@pytest.mark.parametrize("why", ["removed by a user", "nothing protects it"])
def test_a_read_is_recorded_although_the_set_goes_right_after_it(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restored file becomes a newer set, which may be found in the same pass as the read."""
    recorded: list[tuple[EventKind, str]] = []

    def record(kind: EventKind, **fields: Any) -> None:
        recorded.append((kind, fields["set"]))

    monkeypatch.setattr(events, "record", record)

    async def act(cluster: SimulatedCluster, dice: random.Random) -> None:
        node = cluster.living[0]
        await node.write(FILE, dice.randbytes(1000))
        await node.write("step_2.bin", dice.randbytes(1000))
        await trio.sleep(SETTLE_S)
        sets = await list_history(node)
        (series,) = history.list_series(node.db)
        read = sets[f"step_*.bin/{FILE}@1"][FILE]
        directory = {one.record.number: one.directory for one in history.list_sets(node.db, series.directory)}[1]
        if why == "nothing protects it":
            await node.unlink(FILE)
        else:
            with node.db.transaction() as db:
                user_settings.set_setting(db, inodes.get(db, directory), b"remove", b"now", 0)
        node.mount.context.open_files.producers.note_reader(0, read)
        await trio.sleep(SETTLE_S)
        assert list(await list_history(node)) == ["step_*.bin/step_2.bin@2"]
        assert [kind for kind, name in recorded if name == f"{FILE}@1"][-2:] == [EventKind.LOAD, EventKind.EXPIRED]

    simulate(act, 1)
