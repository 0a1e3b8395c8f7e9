"""Series of checkpoints: which names form one, which members are complete, and which complete member is the newest. Pure rules."""

from ckptfs.series.completeness import Completeness, find_incomplete_reason
from ckptfs.series.patterns import (
    Series,
    find_series,
    get_place,
    is_temporary,
    list_members,
    list_patterns,
    list_series,
    parse,
    suggest_series,
)
from ckptfs.series.search import LatestMember, Listing, MemberReader, SearchResult, find_newest, judge
from ckptfs.series.set_kinds import MemberFile

__all__ = [
    "Completeness",
    "LatestMember",
    "Listing",
    "MemberFile",
    "MemberReader",
    "SearchResult",
    "Series",
    "find_incomplete_reason",
    "find_newest",
    "find_series",
    "get_place",
    "is_temporary",
    "judge",
    "list_members",
    "list_patterns",
    "list_series",
    "parse",
    "suggest_series",
]  # fmt: skip
