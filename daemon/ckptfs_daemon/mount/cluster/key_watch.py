"""A watch of a few keys of the store: what is there, then what is put."""

import logging
from collections.abc import Callable, Iterable

import trio

from ckptfs import limits
from ckptfs.errors import CkptfsError
from ckptfs.store.kv import Get, Store, Watch, WatchEvents, prefix_end
from ckptfs_daemon.mount.cluster.cluster_recovery import wait_outcome

log = logging.getLogger(__name__)


async def follow_keys(store: Store, prefix: bytes, on_keys: Callable[[Iterable[bytes]], None]) -> None:
    """Call `on_keys` with all keys below a prefix, then with those that are put. A task.

    A key may come twice. None is missed: after a break all are read again.
    """
    while True:
        try:
            revision = await _read_keys(store, prefix, on_keys)
            watch = store.watch(prefix, prefix_end(prefix), revision + 1)
            try:
                while (batch := await next_events(watch)) is not None:
                    on_keys([event.key for event in batch.events if event.item is not None])
            finally:
                watch.close()
        except CkptfsError as failure:
            log.debug("etcd: %s: cannot be watched: %s; reading it again", prefix.decode(), failure)
        await trio.sleep(limits.STORE_PROBE_S)


async def _read_keys(store: Store, prefix: bytes, on_keys: Callable[[Iterable[bytes]], None]) -> int:
    """Call `on_keys` with the keys, in pages. Return the revision that they are of."""
    revision, key = 0, prefix
    while True:
        get = Get(key, prefix_end(prefix), limit=limits.ETCD_PAGE_ITEMS, revision=revision)
        found = await wait_outcome(store.read_soon([get]))
        revision, items = revision or found.revision, found.results[0]
        on_keys([item.key for item in items])
        if len(items) < limits.ETCD_PAGE_ITEMS:
            return revision
        key = items[-1].key + b"\0"


async def next_events(watch: Watch) -> WatchEvents | None:
    """Wait for the next events. Returns None if the watch has ended."""
    return await trio.to_thread.run_sync(lambda: next(watch, None), abandon_on_cancel=True)
