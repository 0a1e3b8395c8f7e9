"""The tables `[[retention]]`: parsing, refusals (P11), and the rule of a series. Pure.

Rules that contradict themselves or the mount are refused when it starts, so that what a rule says can always be done.
"""

import os
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from ckptfs import limits
from ckptfs.config.schema import RULE_SETTINGS, Config, RetentionRule, Setting, parse_tables
from ckptfs.errors import ConfigError
from ckptfs.model import Level
from ckptfs.quantities import format_count, format_duration, format_ordinal

ParseSetting = Callable[[Setting, Any], dict[str, Any]]


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
