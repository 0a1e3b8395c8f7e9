"""The tables `[[retention]]` and `[[series]]` of the configuration: parsing, and refusals (P11). Pure.

Retention rules that contradict themselves or the mount are refused when it starts, so that what a rule says can always be done. What the
rules of series mean is in `ckptfs.series.rules`.
"""

import os
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, TypeVar

from ckptfs import limits
from ckptfs.config.schema import RULE_SETTINGS, Config, RetentionRule, Setting, named, parse_seconds
from ckptfs.errors import ConfigError
from ckptfs.model import Level, SeriesRule
from ckptfs.quantities import format_count, format_duration, format_ordinal

T = TypeVar("T")
ParseSetting = Callable[[Setting, Any], dict[str, Any]]
NAME_BYTES_MAX = 255
FILES_MAX = 1_000_000
_GLOB = re.compile(r"\*\*|[?\[\]]")
_DURATION = re.compile(r"[0-9.]+\s*(ms|s|min|m|h|d)")
_ACCEPTED = 'the name of the file that is written last, the number of files, or how long nothing changes, as in "30s"'


def parse_tables(kind: str, tables: Any, at_most: int, settings: Iterable[Setting], parse: Callable[[dict[str, Any]], T]) -> tuple[T, ...]:
    """Return the rules of the tables `[[kind]]` of a file. Raises ConfigError, which says of which one."""
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{kind}: this is not a list of tables", remedy=f"begin each rule with a line [[{kind}]]")
    if len(tables) > at_most:
        raise ConfigError(f"{kind}: {len(tables)} rules were given; accepted: up to {at_most}")
    known, rules = [key.name for key in settings], []
    for number, table in enumerate(tables, 1):
        with named(f"{kind} rule {number}"):
            if unknown := [key for key in table if key not in known]:
                raise ConfigError(f"unknown key {unknown[0]!r}; accepted: {', '.join(known)}")
            rules.append(parse(table))
    return tuple(rules)


# --- retention --------------------------------------------------------------------------------------------------------


def parse_rules(tables: Any, parse: ParseSetting) -> tuple[RetentionRule, ...]:
    """Return the rules of the tables; `parse` returns {field: value} of one key. Raises ConfigError."""
    known = {key.name: key for key in RULE_SETTINGS}

    def parse_rule(table: dict[str, Any]) -> RetentionRule:
        values: dict[str, Any] = {}
        for name, text in table.items():
            values |= parse(known[name], text)
        if "path" not in values:
            raise ConfigError("no path was given", remedy='name the series that it is for, as in path = "run*/step_*"')
        if len(values) == 1:
            raise ConfigError("it says nothing", remedy="give keep or another key, see ckptfs.toml(5)")
        return RetentionRule(**values)

    return parse_tables("retention", tables, limits.RETENTION_RULES_MAX, RULE_SETTINGS, parse_rule)


def check_rules(config: Config) -> None:
    """Refuse rules that contradict themselves or the rest of the configuration. Raises ConfigError."""
    for rule in config.retention:
        for condition, problem, remedy in _list_contradictions(rule, config):
            if condition:
                raise ConfigError(f"retention rule for {rule.path}: {problem}", remedy=remedy)


def _list_contradictions(rule: RetentionRule, config: Config) -> Iterable[tuple[bool, str, str]]:
    """Return (whether it holds, problem, remedy) of everything that a rule cannot say."""
    keep, keep_local, keep_pfs, every = rule.keep, rule.keep_local, rule.keep_pfs, rule.pfs_every
    for_pfs = [name for name, value in (("keep_local", keep_local), ("keep_pfs", keep_pfs), ("pfs_every", every),
               ("pfs_interval", rule.pfs_interval_s)) if value is not None]  # fmt: skip
    return (
        (config.pfs is None and bool(for_pfs), f"{', '.join(for_pfs)} needs a PFS", "give pfs=DIRECTORY, or only keep and keep_every"),
        (config.fsync is Level.PFS and rule.selects_for_pfs,
         "fsync=pfs waits for the PFS, and the rule keeps files away from it", "give fsync=local or fsync=clique"),
        (every is not None and rule.pfs_interval_s is not None, "pfs_every and pfs_interval exclude one another", "leave one out"),
        (rule.selects_for_pfs and keep is None and keep_local is None,
         "sets that do not go to the PFS would fill RAM and NVMe", "give keep_local or keep, after which they expire"),
        (keep is not None and keep_local is not None and keep_local > keep,
         f"keep_local ({keep_local}) is more than keep ({keep})", "raise keep, or leave out keep_local"),
        (keep is not None and keep_pfs is not None, "keep and keep_pfs exclude one another",
         "leave out keep: sets then expire when keep_local and keep_pfs let them"),
        (keep_local is not None and keep_pfs is not None and keep_local > keep_pfs * (every or 1),
         f"keep_local ({keep_local}) sets reach further back than keep_pfs ({keep_pfs}) sets on the PFS", "raise keep_pfs"),
    )  # fmt: skip


def describe_rule(rule: RetentionRule) -> str:
    """Return what a rule says, as a sentence."""
    every = format_ordinal(rule.keep_every or 0)
    parts = (
        (rule.keep, f"keeps {format_count(rule.keep or 0, 'set')}"),
        (rule.keep_every, f"keeps every {every} set for good"),
        (rule.pfs_every, f"every {format_ordinal(rule.pfs_every or 0)} set goes to the PFS"),
        (rule.pfs_interval_s, f"one set in {format_duration(rule.pfs_interval_s or 0)} goes to the PFS"),
        (rule.keep_local, f"{rule.keep_local} stay in RAM and NVMe"),
        (rule.keep_pfs, f"{rule.keep_pfs} stay on the PFS"),
        (rule.incomplete_after_s, f"incomplete ones go after {format_duration(rule.incomplete_after_s or 0)}"),
    )
    return f"{rule.path}: {', '.join(text for value, text in parts if value is not None)}"


# --- the rule of a series -----------------------------------------------------------------------------------------------


def find_rule(rules: Iterable[RetentionRule], path: bytes) -> RetentionRule | None:
    """Return the first rule that matches the path of a series. Returns None if none does."""
    return next((rule for rule in rules if _compile(rule.path).fullmatch(path)), None)


def find_directory_rule(rules: Iterable[RetentionRule], path: bytes) -> RetentionRule | None:
    """Return the first rule for series in the directory `path`; b"" is the root. Returns None without one."""
    for rule in rules:
        above = rule.path.rpartition("/")[0]
        if _compile(above).fullmatch(path) if above else not path:
            return rule
    return None


@lru_cache(maxsize=limits.RETENTION_RULES_MAX * 2)
def _compile(glob: str) -> "re.Pattern[bytes]":
    """Return the pattern of a glob; `**` stands for any number of directories."""
    parts = []
    for name in glob.split("/"):
        text = "".join({"*": "[^/]*", "?": "[^/]"}.get(letter, re.escape(letter)) for letter in name)
        parts.append("(?:[^/]+/)*" if name == "**" else f"{text}/")
    whole = "".join(parts)
    pattern = whole.removesuffix("/") if whole.endswith("/") else f"(?:{whole}[^/]+)?"
    return re.compile(os.fsencode(pattern), re.DOTALL)


# --- names of series --------------------------------------------------------------------------------------------------


def parse_pattern(text: Any) -> str:
    """Return the pattern of the names of a series. Raises ConfigError."""
    words = "accepted: one name without directories, with a * for each number, as in snapshot*.bin"
    if not isinstance(text, str) or not _is_name(text) or _GLOB.search(text):
        raise ConfigError(f"{text!r} names no series; {words}")
    return text


def _is_name(text: str) -> bool:
    return 0 < len(text.encode()) <= NAME_BYTES_MAX and text not in (".", "..") and not re.search(r"[/\0]", text)


def parse_complete(value: Any) -> dict[str, Any]:
    """Return the fields of a rule that say when a member is complete. Raises ConfigError."""
    if isinstance(value, int) and not isinstance(value, bool):
        if not 0 < value <= FILES_MAX:
            raise ConfigError(f"{value} is not a number of files; accepted: {_ACCEPTED}")
        return {"files": value}
    if isinstance(value, str) and _DURATION.fullmatch(value) and parse_seconds(value):
        return {"quiet_s": parse_seconds(value)}
    if not isinstance(value, str) or not all(map(_is_name, value.split("/"))) or _DURATION.fullmatch(value) or _GLOB.search(value):
        raise ConfigError(f"{value!r} does not say when a member is complete; accepted: {_ACCEPTED}")
    return {"last": value}


SERIES_SETTINGS: tuple[Setting, ...] = (
    Setting("pattern", "pattern", parse_pattern, None,
        "The name of a member, with a * for each number that differs from one checkpoint to the next. The first * decides the order,\n"
        "unless a word before a number says that it counts steps. Without a * it is one file or directory that is written again and again.",
        '"snapshot*.bin"'),
    Setting("complete", "complete", parse_complete, None,
        "When a member is complete: the name of the file in it that is written last; the same beside it, with a * for each number, as in\n"
        "snapshot*.done; the number of its files; or how long nothing of it changes, as in 30s. Default: as without the rule.",
        '"DONE"'),
)  # fmt: skip
"""The keys of a table `[[series]]`."""


def parse_series_rules(tables: Any) -> tuple[SeriesRule, ...]:
    """Return the rules of the tables. Raises ConfigError."""
    known: set[str] = set()

    def parse_rule(table: dict[str, Any]) -> SeriesRule:
        rule = _parse_rule(table)
        if rule.pattern in known:
            raise ConfigError(f"{rule.pattern!r} has a rule already")
        known.add(rule.pattern)
        return rule

    return parse_tables("series", tables, limits.SERIES_RULES_MAX, SERIES_SETTINGS, parse_rule)


def _parse_rule(table: dict[str, Any]) -> SeriesRule:
    if "pattern" not in table:
        raise ConfigError("no pattern was given", remedy='name the members, as in pattern = "snapshot*.bin"')
    with named("pattern"):
        pattern = parse_pattern(table["pattern"])
    with named("complete"):
        rule = SeriesRule(pattern, **(parse_complete(table["complete"]) if "complete" in table else {}))
        if "*" in rule.last and ("/" in rule.last or rule.last.count("*") != rule.pattern.count("*")):
            remedy = "give a file beside the members one * for each * of the pattern"
            raise ConfigError(f"{rule.last!r} does not fit {rule.pattern!r}", remedy=remedy)
    return rule
