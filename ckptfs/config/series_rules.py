"""The tables `[[series]]` of the configuration: parsing, and refusals (P11). Pure.

What they mean is in `ckptfs.series.rules`.
"""

import re
from collections.abc import Callable
from typing import Any

from ckptfs import limits
from ckptfs.config.schema import Setting, parse_seconds
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
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError("series: this is no list of tables", remedy="begin each rule with a line [[series]]")
    if len(tables) > limits.SERIES_RULES_MAX:
        raise ConfigError(f"series: {len(tables)} rules were given; accepted: up to {limits.SERIES_RULES_MAX}")
    rules: dict[str, SeriesRule] = {}
    for number, table in enumerate(tables, 1):
        try:
            rule = _parse_rule(table)
            if rule.pattern in rules:
                raise ConfigError(f"{rule.pattern!r} has a rule already")
        except ConfigError as failure:
            raise ConfigError(f"series rule {number}: {failure}", remedy=failure.remedy) from failure
        rules[rule.pattern] = rule
    return tuple(rules.values())


def _parse_rule(table: dict[str, Any]) -> SeriesRule:
    known = [key.name for key in SERIES_SETTINGS]
    unknown = [key for key in table if key not in known]
    if unknown:
        raise ConfigError(f"unknown key {unknown[0]!r}; accepted: {', '.join(known)}")
    if "pattern" not in table:
        raise ConfigError("no pattern was given", remedy='name the members, as in pattern = "snapshot*.bin"')
    values = {"pattern": _parse(parse_pattern, "pattern", table)}
    rule = SeriesRule(**values, **(_parse(parse_complete, "complete", table) if "complete" in table else {}))
    if "*" in rule.last and ("/" in rule.last or rule.last.count("*") != rule.pattern.count("*")):
        raise ConfigError(
            f"complete: {rule.last!r} does not fit {rule.pattern!r}",
            remedy="give a file beside the members one * for each * of the pattern",
        )
    return rule


def _parse(parse: Callable[[Any], Any], key: str, table: dict[str, Any]) -> Any:
    try:
        return parse(table[key])
    except ConfigError as failure:
        raise ConfigError(f"{key}: {failure}", remedy=failure.remedy) from failure
