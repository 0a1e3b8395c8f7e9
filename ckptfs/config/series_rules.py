"""The tables `[[series]]` of the configuration: parsing, and refusals (P11). Pure.

What they mean is in `ckptfs.series.rules`.
"""

import re
from typing import Any

from ckptfs import limits
from ckptfs.config.schema import Setting, named, parse_seconds, parse_tables
from ckptfs.errors import ConfigError
from ckptfs.model import SeriesRule

NAME_BYTES_MAX = 255
FILES_MAX = 1_000_000
_GLOB = re.compile(r"\*\*|[?\[\]]")
_DURATION = re.compile(r"[0-9.]+\s*(ms|s|min|m|h|d)")
_ACCEPTED = 'the name of the file that is written last, the number of files, or how long nothing changes, as in "30s"'


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
            raise ConfigError(f"{value} is no number of files; accepted: {_ACCEPTED}")
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
