"""The mount's traffic with the store: fresh rows and published changes before a reply.

Concurrent reads share one transaction, and so do changes. One commit runs at a time; changes that gather meanwhile go with the next one,
which one of the waiting handlers runs. If the store does not answer, the node is disconnected: handlers answer from the rows, changes stay
dirty and no request waits for them, until the store is back and has all of them. Everything belongs to the trio thread; only the futures of
the store are completed by its own threads.

Crash safety: unpublished changes are dirty in the catalog, and the next process publishes them first.
"""

import contextlib
import errno
import functools
import itertools
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import trio

import ckptfs
from ckptfs import limits
from ckptfs.catalog import handles, identity, peer_copies, summary
from ckptfs.catalog.database import Database
from ckptfs.clique import locations, membership
from ckptfs.coherence import chain, commit, conflict, kept_names, key_state, read, reintegrate, store_loss, unreadable_keys, value_checks
from ckptfs.coherence.conflict import CommitResult, ConflictResolver
from ckptfs.coherence.keys import INODE, NAME, SharedKey, Value, describe_path
from ckptfs.coherence.read import RecentDeletes, StoreValue
from ckptfs.coherence.store_loss import AdoptionStep, EpochCheckedStore
from ckptfs.errors import CATALOG_FAILURES, CkptfsError, StoreLost, StoreUnreachable, TooManyOperations, TransactionInvalid, posix_error
from ckptfs.store.kv import Get, Outcome, Store, Watch, WatchEvents, prefix_end, read_all
from ckptfs_daemon.mount.cluster import cluster_recovery
from ckptfs_daemon.mount.cluster.cluster_recovery import wait_outcome

log = logging.getLogger(__name__)
T = TypeVar("T")
Name = tuple[int, bytes]
TROUBLE = "sharing"
REACH_REMEDY = "see that etcd runs and can be reached; changes of this node are published then"
UNSHARED_TROUBLE = "unshared"
RECORD_WAIT_S = 2 * limits.NODE_LEASE_RENEW_S


class PendingRead:
    """Keys that one handler waits for."""

    def __init__(self, gets: list[Get]) -> None:
        self.gets = gets
        self.done = trio.Event()
        self.outcome: Outcome | None = None


class CommitRounds:
    """Rounds of commits: one at a time, from the first `end_round` on; callers meanwhile wait for it."""

    def __init__(self) -> None:
        self._is_running = True
        self._changed = trio.Event()

    async def run_or_wait(self, act: Callable[[], Awaitable[object]]) -> None:
        """Run `act` as a round; if a round is running, wait for its end or for `wake_waiters` instead."""
        if self._is_running:
            await self._changed.wait()
            return
        self._is_running = True
        try:
            await act()
        finally:
            self.end_round()

    async def wait_idle(self) -> None:
        while self._is_running:
            await self._changed.wait()

    def end_round(self) -> None:
        """End the round; a waiting caller may start the next one."""
        self._is_running = False
        self.wake_waiters()

    def wake_waiters(self) -> None:
        """Make all waiting callers check again."""
        self._changed.set()
        self._changed = trio.Event()


async def next_events(watch: Watch) -> WatchEvents | None:
    """Wait for the next events of a watch. Returns None if it has ended."""
    return await trio.to_thread.run_sync(lambda: next(watch, None), abandon_on_cancel=True)


class LocalNamespace:
    """The tree of a mount without a cluster: always fresh, and no other node waits for changes."""

    is_shared = False
    on_nameless: Callable[[Iterable[int]], None]  # Called with inodes that lost their last name on another node.

    @property
    def is_disconnected(self) -> bool:
        """Return True if the store does not answer."""
        return False

    async def refresh_name(self, parent: int, name: bytes, *prefetch_names: Name) -> None: ...
    async def refresh_inode(self, inode: int, *prefetch_names: Name) -> None: ...
    async def refresh_inodes(self, inodes: Sequence[int]) -> None: ...
    async def refresh_copies(self, inode: int) -> None: ...
    async def refresh_directory(self, inode: int, at_most: int | None = None) -> None: ...
    async def refresh_change(self, names: Iterable[Name]) -> None: ...
    async def follow_keys(self, prefix: bytes, on_keys: Callable[[Iterable[bytes]], None]) -> None: ...
    async def run(self) -> None: ...
    async def follow_store(self) -> None: ...
    def notify_dirty(self) -> None: ...

    async def wait_published(self, names: Iterable[Name] = ()) -> bool:
        """Wait for the store or a disconnection. Return False if one of `names` was reverted."""
        return True

    async def commit_shared(
        self,
        act: Callable[[], Awaitable[T]],
        names: Sequence[Name] = (),
        inodes: Sequence[int] = (),
        undo: Callable[[T], None] = lambda _: None,
        is_own: Callable[[], bool] = lambda: True,
    ) -> T:
        """Run `act`, a change of these names and inodes, and wait until other nodes see it."""
        return await act()


class SharedNamespace(LocalNamespace):
    """This node's view of the shared tree."""

    is_shared = True

    def __init__(self, db: Database, store: Store, label: str, *, is_member: bool = True) -> None:
        """`label` marks this node in names of conflict copies.

        A node that is no member has no record in the store.
        """
        self.db = db
        self.number = identity.get_node_number(db)
        self._label = label
        self._is_member = is_member
        self.counts = {"reads": 0, "commits": 0, "conflicts": 0}
        self.disconnected_ns = key_state.get_disconnected_ns(db)
        self._store = EpochCheckedStore(store, db)
        self.on_nameless = lambda _: None
        self._recent_deletes = RecentDeletes()
        self._pending_reads: deque[PendingRead] = deque()
        self._running_reads = 0
        self._has_dirty = trio.Event()
        self._commit_rounds = CommitRounds()
        self._reverted: dict[SharedKey, int] = {}
        self._reverts = 0
        self._unconfirmed: commit.StoreTransaction | None = None
        self._changes_max = limits.ETCD_OPERATIONS_MAX
        self._logged_failure = ""
        self._is_store_lost = False
        self._next_probe_s = 0.0

    @property
    def is_disconnected(self) -> bool:
        return self.disconnected_ns != 0

    # --- reading ------------------------------------------------------------------------------------------------------

    async def refresh_name(self, parent: int, name: bytes, *prefetch_names: Name) -> None:
        """Make the rows of a name and of its inode fresh, and those of names that may be looked up next."""
        await self._refresh(read.list_name_keys(self.db, parent, name), prefetch_names)

    async def refresh_inode(self, inode: int, *prefetch_names: Name) -> None:
        """Make the rows of an inode fresh, and those of names that will probably be looked up next."""
        await self._refresh(read.list_inode_keys(self.db, inode), prefetch_names)

    async def refresh_inodes(self, inodes: Sequence[int]) -> None:
        """Make the rows of these inodes fresh, of many in one round trip."""
        at_once = limits.ETCD_OPERATIONS_MAX // read.INODE_KEYS_MAX
        for start in range(0, len(inodes), at_once):
            await self._refresh([key for inode in inodes[start : start + at_once] for key in read.list_inode_keys(self.db, inode)])

    async def refresh_copies(self, inode: int) -> None:
        """Load which nodes hold the content of a file that another node wrote."""
        content = peer_copies.find_remote_content(self.db, inode)
        if content is None:
            return
        found = await self._read([*locations.build_gets(content)])
        if found is not None:
            with self._go_alone_if_full(), self.db.transaction():
                locations.record(self.db, content, locations.parse(content, *found.results), self.number)

    async def refresh_directory(self, inode: int, at_most: int | None = None) -> None:
        """Make a directory and its names fresh, and load unknown inodes. `at_most`: only the first names.

        No yield point follows the last names. Raises ValueUnreadable.
        """
        own = read.list_inode_keys(self.db, inode)
        after: bytes | None = b""
        while after is not None and not self.is_disconnected:
            items = at_most or limits.ETCD_PAGE_ITEMS
            found = await self._read([read.build_page_get(inode, after, items), *read.build_gets(own)])
            if found is None:
                return
            parse = functools.partial(read.parse_page, self.db, inode, after, items, found, only_new=True)
            values, after = parse()
            values |= read.parse_outcome(own, replace(found, results=found.results[1:]))
            if keys := read.list_unknown(self.db, inode, read.list_missing_keys(self.db, values)):
                values |= await self._load_values(keys)
                values |= parse()[0]  # Meanwhile an older answer may have brought names back that are gone.
            with self._go_alone_if_full():
                self._apply(values)
            read.require_readable(values, own)
            if at_most:
                return

    async def refresh_change(self, names: Iterable[Name]) -> None:
        """Refresh what a change of names rests on: them, directories above, emptiness of children."""
        for parent, name in names:
            await self.refresh_ancestors(parent)
            await self.refresh_name(parent, name)
            child = read.find_directory(self.db, parent, name)
            if child is not None:
                await self.refresh_directory(child, at_most=1)

    async def refresh_ancestors(self, inode: int) -> None:
        visited_inodes: set[int] = set()
        while inode and inode not in visited_inodes:
            visited_inodes.add(inode)
            await self._refresh(read.load_directory_location(self.db, inode)[0])
            inode = read.load_directory_location(self.db, inode)[1]

    async def _refresh(self, keys: list[SharedKey], prefetch_names: Iterable[Name] = ()) -> None:
        """Make these keys fresh, and all that they lead to. Raises ValueUnreadable."""
        values = await self._load_values([*keys, *(key for at, what in prefetch_names for key in read.list_name_keys(self.db, at, what))])
        while values and (more := read.list_missing_keys(self.db, values) or read.list_overtaken_names(values)):
            found = await self._load_values(more)
            if not found:
                return
            values.update(found)
        with self._go_alone_if_full():
            self._apply(values)
        read.require_readable(values, keys)

    async def _load_values(self, keys: list[SharedKey]) -> dict[SharedKey, StoreValue]:
        """Return the values of these keys in the store, or nothing if it does not answer."""
        if not keys:
            return {}
        found = await self._read(read.build_gets(keys))
        return {} if found is None else read.parse_outcome(keys, found)

    def _apply(self, values: Mapping[SharedKey, StoreValue]) -> None:
        nameless = read.apply_values(self.db, values, self._recent_deletes)
        if nameless:
            self.on_nameless(nameless)

    @contextlib.contextmanager
    def _go_alone_if_full(self) -> Iterator[None]:
        """Disconnect the node if the catalog cannot be written: handlers answer from the rows then."""
        try:
            yield
        except CATALOG_FAILURES as failure:
            self._handle_failure(failure)

    async def _read(self, gets: list[Get]) -> Outcome | None:
        """Read together with all handlers that read now. Returns None if the store does not answer."""
        if self.is_disconnected:
            return None
        question = PendingRead(gets)
        self._pending_reads.append(question)
        if self._running_reads < limits.SHARED_READS_MAX:
            self._running_reads += 1
            await self._read_batch()
        if not question.done.is_set():
            await question.done.wait()
        return question.outcome

    async def _read_batch(self) -> None:
        """Read for as many waiting handlers as fit; then start a task that reads for the others."""
        questions: list[PendingRead] = []
        count = 0
        while self._pending_reads and (not questions or count + len(self._pending_reads[0].gets) <= limits.ETCD_OPERATIONS_MAX):
            questions.append(self._pending_reads.popleft())
            count += len(questions[-1].gets)
        try:
            if questions and not self.is_disconnected:
                await self._answer_together(questions)
        except CkptfsError as failure:
            self._handle_failure(failure)
        finally:
            for question in questions:
                question.done.set()
            self._running_reads -= 1
            if self._pending_reads:
                self._running_reads += 1
                trio.lowlevel.spawn_system_task(self._read_batch, name="shared reads")

    async def _answer_together(self, questions: Iterable[PendingRead]) -> None:
        self._next_probe_s = trio.current_time() + limits.STORE_POLL_S * random.uniform(0.8, 1.2)
        self.counts["reads"] += 1
        found = await wait_outcome(self._store.read_soon([get for question in questions for get in question.gets]))
        results = iter(found.results)
        for question in questions:
            question.outcome = Outcome(True, found.revision, tuple(itertools.islice(results, len(question.gets))))

    async def follow_keys(self, prefix: bytes, on_keys: Callable[[Iterable[bytes]], None]) -> None:
        """Call `on_keys` with all keys below a prefix, then with those that are put. A task.

        A key may come twice. None is missed: after a break all are read again.
        """
        while True:
            try:
                load = functools.partial(read_all, self._store, prefix, keys_only=True)
                revision, items = await trio.to_thread.run_sync(load, abandon_on_cancel=True)
                on_keys([item.key for item in items])
                with contextlib.closing(self._store.watch(prefix, prefix_end(prefix), revision + 1)) as watch:
                    while (batch := await next_events(watch)) is not None:
                        on_keys([event.key for event in batch.events if event.item is not None])
            except CkptfsError as failure:
                log.debug("etcd: %s: cannot be watched: %s; reading it again", prefix.decode(), failure)
            await trio.sleep(limits.STORE_PROBE_S)

    # --- publishing ---------------------------------------------------------------------------------------------------

    def notify_dirty(self) -> None:
        """Wake the task that publishes. Called in the trio thread."""
        self._has_dirty.set()

    async def wait_published(self, names: Iterable[Name] = ()) -> bool:
        reverts = self._reverts
        last = key_state.get_last_change(self.db)
        while last and not self.is_disconnected and key_state.has_dirty(self.db, last):
            await self._commit_rounds.run_or_wait(self._commit_batch)
        return not any(self._reverted.get(SharedKey(NAME, parent, name), 0) > reverts for parent, name in names)

    async def commit_shared(
        self,
        act: Callable[[], Awaitable[T]],
        names: Sequence[Name] = (),
        inodes: Sequence[int] = (),
        undo: Callable[[T], None] = lambda _: None,
        is_own: Callable[[], bool] = lambda: True,
    ) -> T:
        """Run `act` until other nodes see what it changed.

        If it fails on the rows of this node, or another node was faster, it runs again on fresh rows. `undo` gets the result of an `act`
        that was reverted. Raises EAGAIN after `limits.SHARED_TRIES_MAX` tries, and if this node is disconnected and the change is not
        `is_own`.
        """
        is_fresh = False
        for _ in range(limits.SHARED_TRIES_MAX):
            await self._wait_until_allowed(is_own, names)
            try:
                result = await act()
            except (OSError, CkptfsError):
                if is_fresh or self.is_disconnected:
                    raise
            else:
                if await self.wait_published(names):
                    return result
                undo(result)
            await self.refresh_inodes(inodes)
            await self.refresh_change(names)
            is_fresh = True
        raise posix_error(errno.EAGAIN)

    async def _wait_until_allowed(self, is_own: Callable[[], bool], names: Iterable[Name]) -> None:
        """Wait for the store before a change that must not be made without it. Raises EAGAIN."""
        with trio.move_on_after(limits.DISCONNECTED_WAIT_S):
            while self.is_disconnected and not is_own():
                await trio.sleep(limits.STORE_PROBE_S)
            return
        path = describe_path(self.db, [SharedKey(NAME, *name) for name in names])
        log.warning("%s: not renamed: etcd does not answer, and other nodes know what it is or would replace; EAGAIN", path)
        raise posix_error(errno.EAGAIN, f"{path}: etcd does not answer")

    async def run(self) -> None:
        """Publish changes that no handler waits for; while disconnected, probe the store. A task."""
        try:
            key_state.mark_root_dirty(self.db)
            await self._confirm_last_commit()
        except CkptfsError as failure:
            self._handle_failure(failure)
        self._commit_rounds.end_round()
        while True:
            if self.is_disconnected:
                await self._probe_store()
                continue
            self._has_dirty = trio.Event()
            if key_state.get_last_change(self.db):
                await trio.sleep(limits.SHARED_GATHER_S)
                if not self.is_disconnected and key_state.get_last_change(self.db):
                    await self._commit_rounds.run_or_wait(self._commit_batch)
                continue
            with trio.move_on_after(limits.REQUEST_POLL_S):
                await self._has_dirty.wait()
            if trio.current_time() > self._next_probe_s:
                await self._read([])

    async def follow_store(self) -> None:
        """Record how the store is, and delete cached rows beyond the limit. A task."""
        after = 0
        while True:
            await self.report_store()
            after = read.delete_unneeded(self.db, after) if not self.is_disconnected and read.is_cache_full(self.db) else 0
            await trio.sleep(limits.SHARED_REPORT_S if after else limits.FORGET_INTERVAL_S)

    async def report_store(self) -> None:
        """Record how far the store has come, what in it is unreadable, and whether all nodes have adopted it."""
        store_loss.record_revision(self.db, *self._store.epoch_and_revision)
        unreadable_keys.record_found(self.db)
        is_open = store_loss.is_adopting(self.db) or store_loss.get_adoption_step(self.db) is not None
        if is_open and not self.is_disconnected:
            with contextlib.suppress(StoreUnreachable):
                await cluster_recovery.report_adoption(self.db, self._store)

    async def _commit_batch(self) -> bool:
        """Publish one transaction. Returns False if the store does not answer."""
        await trio.lowlevel.checkpoint()
        if self.is_disconnected and key_state.has_overtaken_marks(self.db):
            key_state.order_marks(self.db)
        transaction = commit.build_transaction(self.db, self._changes_max)
        if transaction is None:
            return True
        try:
            if not transaction.new_values:
                conflict.record_commit(self.db, transaction, 0, self._recent_deletes)
                return True
            if await self._keep_in_history(kept_names.list_replaced(self.db, transaction)):
                return True
            self._unconfirmed = transaction
            self.counts["commits"] += 1
            reply = await wait_outcome(
                self._store.commit_soon(transaction.build_compares(), transaction.build_changes(), transaction.build_conflict_gets())
            )
            if reply.is_repeated and not reply.succeeded:
                # An earlier copy of it may still be applied.
                await self._confirm_last_commit()
                return True
            if reply.succeeded:
                conflict.record_commit(self.db, transaction, reply.revision, self._recent_deletes)
            else:
                self.counts["conflicts"] += 1
                resolver = await self._build_resolver(transaction, reply) if self.is_disconnected else ConflictResolver
                self._record_result(conflict.resolve_conflict(self.db, transaction, reply, self._recent_deletes, resolver))
            self._unconfirmed = None
            self._changes_max = min(2 * self._changes_max, limits.ETCD_OPERATIONS_MAX)
        except TransactionInvalid as refusal:
            return self._handle_invalid(transaction, refusal)
        except CkptfsError as failure:
            self._handle_failure(failure)
            return False
        return True

    async def _keep_in_history(self, replaced: Mapping[int, Value]) -> bool:
        """Let sets keep what a transaction replaces. Return True if the transaction is out of date now."""
        is_changed = False
        for inode, known in replaced.items():
            self._apply(await cluster_recovery.load_values(self._store, kept_names.list_needed_keys(known)))
            is_changed |= kept_names.separate(self.db, inode, known)
        return is_changed

    def _handle_invalid(self, transaction: commit.StoreTransaction, refusal: TransactionInvalid) -> bool:
        """Find, by halves, the change that the store refuses for ever. It stays here; the others go on.

        Returns False if the store would take no such change of any file: then this node keeps all, until the store is set up rightly.
        """
        self._unconfirmed = None
        if transaction.change_count > 1:
            self._changes_max = transaction.change_count // 2
            return True
        if isinstance(refusal, TooManyOperations):
            self._handle_failure(refusal)
            return False
        path = conflict.drop_change(self.db, transaction)
        what = f"etcd refuses a change of this file for ever: {refusal}; other nodes do not see it"
        remedy = "see --max-request-bytes of etcd, then change the file again"
        summary.set_trouble(self.db, UNSHARED_TROUBLE, {"what": what, "path": path, "remedy": remedy})
        log.error("%s: a change is not shared: %s; other nodes do not see it (%s)", path, refusal, remedy)
        return True

    async def _build_resolver(self, transaction: commit.StoreTransaction, reply: Outcome) -> Callable[..., ConflictResolver]:
        """Return the resolver for changes made while disconnected, with what it needs of the store."""
        values = read.parse_outcome(transaction.list_conflict_keys(), reply)
        more = await cluster_recovery.load_values(self._store, reintegrate.list_needed_keys(self.db, values))
        return functools.partial(reintegrate.ReintegrationResolver, more=more, label=self._label)

    def _record_result(self, result: CommitResult) -> None:
        if result.reverted_names:
            self._reverts += 1
            self._reverted = {key: at for key, at in self._reverted.items() if at > self._reverts - limits.SHARED_TRIES_MAX}
            self._reverted.update(dict.fromkeys(result.reverted_names, self._reverts))
        if result.unlinked_inodes:
            self.on_nameless(result.unlinked_inodes)

    # --- without the store --------------------------------------------------------------------------------------------

    def _handle_failure(self, failure: CkptfsError) -> None:
        """Disconnect the node: the store fails, or the catalog cannot be written.

        If the disk of the catalog is full, the next failed probe records it.
        """
        was_connected, is_silent = not self.is_disconnected, type(failure) is StoreUnreachable
        # What etcd says while it answers tells more than its silence before or after.
        is_news = was_connected or (not is_silent and str(failure) != self._logged_failure)
        self.disconnected_ns = self.disconnected_ns or time.time_ns()
        self._has_dirty.set()
        self._commit_rounds.wake_waiters()
        trouble = None
        if isinstance(failure, StoreLost):
            self._is_store_lost = True  # Applications go on, until a person has this node adopt the store.
        elif is_news:
            self._logged_failure = str(failure)
            cause = "etcd does not answer" if is_silent else str(failure)
            what = f"{cause}: this node goes on alone, and other nodes do not see what changes here"
            trouble = {"what": what, "path": "", "remedy": failure.remedy if failure.remedy and not is_silent else REACH_REMEDY}
            level = logging.WARNING if isinstance(failure, (StoreUnreachable, *CATALOG_FAILURES)) else logging.ERROR
            log.log(level, "this node is out of touch with the store of the cluster (%s), and goes on alone with what it knows", failure)
        with contextlib.suppress(*CATALOG_FAILURES):
            key_state.mark_disconnected(self.db, self.disconnected_ns)
            if trouble is not None:
                summary.set_trouble(self.db, TROUBLE, trouble)

    async def _probe_store(self) -> None:
        """Check whether the store is back, and publish everything if it is."""
        away_s = (time.time_ns() - self.disconnected_ns) / 1e9
        await trio.sleep(min(max(limits.STORE_PROBE_S, away_s / 8), limits.STORE_PROBE_S_MAX) * random.uniform(0.5, 1.0))
        await self._commit_rounds.wait_idle()
        try:
            if not await self._confirm_or_adopt_store():
                return
            await self._confirm_last_commit()
            await self._wait_for_record()
            await self._record_missed()
            key_state.mark_returning(self.db)
            key_state.order_marks(self.db)
        except CkptfsError as failure:
            self._handle_failure(failure)
            return
        while key_state.get_last_change(self.db) and await self._commit_batch():
            pass
        if key_state.get_last_change(self.db) == 0:
            log.info("the store of the cluster answers again, and has all changes that this node made meanwhile")
            self.disconnected_ns = 0
            key_state.mark_reintegrated(self.db, time.time_ns())
            if store_loss.get_adoption_step(self.db) is AdoptionStep.PUBLISHING:
                store_loss.set_adoption_step(self.db, None)
            summary.set_trouble(self.db, TROUBLE, None)

    async def _wait_for_record(self) -> None:
        """Wait for a limited time until the mover has renewed this node's record.

        Other nodes would take what is published before it for files of a dead node, and fail to read them.
        """
        with trio.move_on_after(RECORD_WAIT_S):
            while self._is_member and not (await wait_outcome(self._store.read_soon([Get(membership.node_key(self.number))]))).results[0]:
                await trio.sleep(limits.STORE_PROBE_S)

    async def _record_missed(self) -> None:
        """Record what others closed of files that are open for writing."""
        written = [SharedKey(INODE, inode) for inode in handles.list_written(self.db)]
        found = await cluster_recovery.load_values(self._store, written)
        reintegrate.record_missed(self.db, {key: one.value for key, one in found.items()})

    async def _confirm_or_adopt_store(self) -> bool:
        """Confirm that the store has the data, or adopt it. Return False if neither is possible now."""
        if self._is_store_lost:
            if not await cluster_recovery.confirm_or_adopt(self.db, self._store, self._label):
                return False
            self._is_store_lost = False
        if store_loss.get_adoption_step(self.db) is AdoptionStep.MERGING:
            self._recent_deletes, self._unconfirmed = RecentDeletes(), None
            await cluster_recovery.merge_store(self.db, self._store)
        return True

    async def _confirm_last_commit(self) -> None:
        """Find out by a fence whether the last transaction passed."""
        await cluster_recovery.ensure_epoch(self.db, self._store)
        link = chain.load_next_link(self.db)
        fence, format_get = link.build_fence(), Get(value_checks.FORMAT_KEY)
        reply = await wait_outcome(
            self._store.commit_soon(
                [link.build_compare()], [fence, format_get], [link.build_get(), format_get], timeout_s=limits.STORE_PROBE_WAIT_S
            )
        )
        change = value_checks.check_format(reply.results[-1], ckptfs.__version__)
        if change is not None:
            await wait_outcome(self._store.commit_soon([change[0]], [change[1]]))
        found = chain.parse_link(link, reply, fence)
        is_of_dead_process = self._unconfirmed is None and chain.get_own_revision(found) > link.revision
        dirty = [key for _, key in key_state.list_dirty(self.db, -1)] if is_of_dead_process else []
        values = await cluster_recovery.load_values(self._store, list(dict.fromkeys(dirty)))
        conflict.record_fence(self.db, link, found, self._unconfirmed, self._recent_deletes, values)
        self._unconfirmed = None
