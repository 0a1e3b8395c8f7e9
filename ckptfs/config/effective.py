"""The effective settings of a mount as text: value and origin of each (`ckptfs config`). Pure.

The parser of a setting accepts the text of its value again. Secrets lie in files, so only their paths are settings.
"""

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
from ckptfs.protocol import control_pb2 as pb

DEFAULT = "default"
DURATIONS = (parse_seconds, parse_optional_seconds, parse_positive_seconds)
SIZES = (parse_memory, parse_optional_size, parse_size_or_share)


def list_effective(config: Config) -> list[pb.ConfigSetting]:
    """Return all settings that have an effect, in the order of the sample file, then the rules.

    A value is empty if it is not set. The origin is `DEFAULT`, `COMMAND_LINE`, or the path of the file.
    """
    origins = dict(config.origins)

    def build(name: str, field: str, value: str) -> pb.ConfigSetting:
        return pb.ConfigSetting(name=name, value=value, origin=origins.get(field, DEFAULT))

    settings = [key for key in SETTINGS if config.cluster is not None or key not in CLUSTER_SETTINGS]
    found = [build(key.name, key.field, format_value(key, getattr(config, key.field))) for key in settings]
    for rule in config.retention:
        words = [f"{key.name}={format_value(key, value)}" for key in RULE_SETTINGS if (value := getattr(rule, key.field)) is not None]
        found.append(build("retention", "retention", " ".join(words)))
    return found + [build("series", "series", _format_series_rule(rule)) for rule in config.series]


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
