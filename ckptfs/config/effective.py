"""The effective settings of a mount as text: value and origin of each (`ckptfs config`). Pure.

The parser of a setting accepts the text of its value again. Secrets lie in files, so only their paths are settings.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from ckptfs.config.schema import (
    CLUSTER_SETTINGS,
    RULE_SETTINGS,
    SETTINGS,
    SIZE_UNITS,
    Config,
    Setting,
    parse_memory,
    parse_optional_seconds,
    parse_optional_size,
    parse_positive_seconds,
    parse_ratio,
    parse_seconds,
    parse_size_or_share,
)
from ckptfs.model import SeriesRule

DEFAULT = "default"
DURATIONS = (parse_seconds, parse_optional_seconds, parse_positive_seconds)
SIZES = (parse_memory, parse_optional_size, parse_size_or_share)


@dataclass(frozen=True, slots=True)
class EffectiveSetting:
    """A setting or a rule.

    `value` is empty if it is not set; `origin` is `DEFAULT`, `COMMAND_LINE`, or the path of the file.
    """

    name: str
    value: str
    origin: str


def list_effective(config: Config) -> list[EffectiveSetting]:
    """Return all settings that have an effect, in the order of the sample file, then the rules."""
    origins = dict(config.origins)
    settings = [key for key in SETTINGS if config.cluster is not None or key not in CLUSTER_SETTINGS]
    found = [EffectiveSetting(key.name, format_value(key, getattr(config, key.field)), origins.get(key.field, DEFAULT)) for key in settings]
    for rule in config.retention:
        words = [f"{key.name}={format_value(key, value)}" for key in RULE_SETTINGS if (value := getattr(rule, key.field)) is not None]
        found.append(EffectiveSetting("retention", " ".join(words), origins.get("retention", DEFAULT)))
    return found + [EffectiveSetting("series", _format_series_rule(rule), origins.get("series", DEFAULT)) for rule in config.series]


def _format_series_rule(rule: SeriesRule) -> str:
    complete = rule.last or (str(rule.files) if rule.files else f"{rule.quiet_s:.15g}s")
    return f"pattern={rule.pattern}" + (f" complete={complete}" if rule.says_complete else "")


def format_value(key: Setting, value: Any) -> str:
    """Return the value of a setting as it can be given; empty if it is not set."""
    if value is None:
        return "auto" if key.default == "auto" else ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "+".join(value)
    if key.parse in DURATIONS:
        return f"{value:.15g}s"
    if isinstance(value, float) and key.parse in (parse_ratio, parse_size_or_share):
        return f"{100 * value:.12g}%"
    if key.parse in SIZES:
        return _format_exact_size(value)
    return str(value.value if isinstance(value, Enum) else value)


def _format_exact_size(count: int) -> str:
    """Return bytes in the largest unit that divides them."""
    unit = next(one for one, factor in reversed(SIZE_UNITS.items()) if count % factor == 0)
    return f"{count // SIZE_UNITS[unit]}{unit}" if count else "0"
