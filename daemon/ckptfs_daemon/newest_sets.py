"""The sets of a series in the catalog, the newest first, as `series.set_order` says."""

from collections.abc import Callable

from ckptfs.catalog import history_names
from ckptfs.catalog.database import Database
from ckptfs.catalog.history import SeriesRecord
from ckptfs.catalog.history_names import SetName
from ckptfs.series.set_order import SetOrder, build_set_order


def list_newest_first(db: Database, series: SeriesRecord) -> list[SetName]:
    """Return the sets of a series in short, the newest first."""
    names, get_order = history_names.list_set_names(db, series.directory), load_set_order(db, series)
    return sorted(names, key=lambda one: get_order(one.member, one.number), reverse=True)


def load_set_order(db: Database, series: SeriesRecord) -> Callable[[bytes, int], SetOrder]:
    """Return a function that gives the order of a set of the series from its member's name and its number."""
    if series.rollback is None:
        return build_set_order(series.pattern)
    since = history_names.list_completed_since(db, history_names.list_set_names(db, series.directory), series.rollback.at_ns)
    return build_set_order(series.pattern, series.rollback.number, {one.number for one in since})
