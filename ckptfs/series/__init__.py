"""Series of checkpoints: their names, their complete members, and the newest of these. Pure rules."""

from ckptfs.series.completeness import Completeness, find_incomplete_reason
from ckptfs.series.file_groups import replace_group
from ckptfs.series.patterns import (
    Series,
    build_series,
    choose_part,
    counts_checkpoints,
    find_series,
    get_place,
    is_temporary,
    list_members,
    list_patterns,
    list_series,
    parse,
    suggest_series,
)
from ckptfs.series.rules import decode_rules, encode_rules, install_rules
from ckptfs.series.search import (
    MANIFESTS,
    KnownSet,
    KnownSets,
    LatestAnswer,
    LatestMember,
    Listing,
    MemberReader,
    SearchResult,
    find_newest,
    judge,
    judge_kept,
)
from ckptfs.series.set_kinds import MemberFile

__all__ = [
    "MANIFESTS", "Completeness", "KnownSet", "KnownSets", "LatestAnswer", "LatestMember", "Listing", "MemberFile", "MemberReader",
    "SearchResult", "Series", "build_series", "choose_part", "counts_checkpoints", "decode_rules", "encode_rules", "find_incomplete_reason",
    "find_newest", "find_series", "get_place", "install_rules", "is_temporary", "judge", "judge_kept", "list_members",
    "list_patterns", "list_series", "parse", "replace_group", "suggest_series",
]  # fmt: skip
