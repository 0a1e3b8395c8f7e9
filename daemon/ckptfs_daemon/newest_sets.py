"""The sets of a series in the catalog, the newest first, as `series.set_order` says."""

from collections.abc import Callable, Collection

from ckptfs.catalog import history, history_names, set_members
from ckptfs.catalog.database import Database
from ckptfs.catalog.history import SeriesRecord
from ckptfs.catalog.history_names import SetName
from ckptfs.series.set_order import SetOrder, build_set_order, list_overtaken


def list_newest_first(db: Database, series: SeriesRecord) -> list[SetName]:
    """Return the sets of a series in short, the newest first."""
    names = history_names.list_set_names(db, series.directory)
    get_order = load_set_order(db, series, names)
    return sorted(names, key=lambda one: get_order(one.member, one.number), reverse=True)


def load_set_order(db: Database, series: SeriesRecord, names: Collection[SetName]) -> Callable[[bytes, int], SetOrder]:
    """Return a function that gives the order of a set from its member's name and its number.

    `names`: all sets of the series.
    """
    replaced = _list_replaced(db, series, names)
    if series.rollback is None:
        return build_set_order(series.pattern, replaced=replaced)
    since = {one.number for one in history_names.list_completed_since(db, names, series.rollback.at_ns)}
    return build_set_order(series.pattern, series.rollback.number, since, replaced)


def _list_replaced(db: Database, series: SeriesRecord, names: Collection[SetName]) -> set[int]:
    """Return the sets of which the application deleted files before it saved one of an earlier step."""
    get_order = build_set_order(series.pattern)
    overtaken = list_overtaken({one.number: get_order(one.member, one.number) for one in names})
    directories = {one.number: one.directory for one in names} if overtaken else {}
    known = set_members.list_known_sets(db, [directories[number] for number, _ in overtaken])
    gone = [pair for pair in overtaken if known.get(directories[pair[0]]) is False]
    return {one for one, later in gone if _is_replaced(db, directories[one], directories[later])}


def _is_replaced(db: Database, directory: int, later: int) -> bool:
    """Return whether a complete set lost names before another was written.

    What was only overwritten has its old times.
    """
    known = history.get_set(db, directory)
    return known is not None and known.record.completed_ns < _get_times(db, directory)[1] < _get_times(db, later)[0]


def _get_times(db: Database, directory: int) -> tuple[int, int]:
    """Return when the files of a set were written last, and when one of them lost a name or was changed."""
    files = [one for path, one in history.list_files(db, directory) if path not in set_members.MANIFEST_NAMES]
    return max((one.mtime_ns for one in files), default=0), max((one.ctime_ns for one in files), default=0)
