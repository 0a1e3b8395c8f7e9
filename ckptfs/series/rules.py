"""The rules of the configuration for unknown names, and for the completeness of such members (P11).

A process serves one mount. It installs the rules of that mount once, before it asks anything of `ckptfs.series`; without rules all is as
programs name and mark their checkpoints. A rule counts before everything that is known of names.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict

from ckptfs.model import SeriesRule

WILDCARD = b"*"
_NUMBER = rb"([0-9]+)"
_rules: dict[bytes, SeriesRule] = {}


def install_rules(rules: Iterable[SeriesRule]) -> None:
    """Replace the rules of this process."""
    _rules.clear()
    _rules.update({os.fsencode(rule.pattern): rule for rule in rules})


def get_rule(pattern: bytes) -> SeriesRule | None:
    """Return the rule of the series with this name. Returns None if it has none."""
    return _rules.get(pattern)


def list_ruled_patterns() -> Iterable[bytes]:
    """Return the names of the series with rules, in the order of the configuration."""
    return _rules.keys()


def encode_rules(rules: Iterable[SeriesRule]) -> bytes:
    """Return rules as one text, for `decode_rules`."""
    return json.dumps([asdict(rule) for rule in rules]).encode()


def decode_rules(text: bytes) -> tuple[SeriesRule, ...]:
    """Return what `encode_rules` was given."""
    return tuple(SeriesRule(**rule) for rule in json.loads(text))


def find_marks(names: Iterable[bytes]) -> dict[bytes, bytes]:
    """Return for each member that has a file beside it which marks its end, the name of that file."""
    marks = {pattern: os.fsencode(rule.last) for pattern, rule in _rules.items() if WILDCARD in os.fsencode(rule.last)}
    found = {}
    for name in names if marks else ():
        for pattern, mark in marks.items():
            if numbers := _compile(mark).fullmatch(name):
                found[_fill(pattern, numbers.groups())] = name
    return found


def _compile(pattern: bytes) -> "re.Pattern[bytes]":
    return re.compile(_NUMBER.join(map(re.escape, pattern.split(WILDCARD))), re.DOTALL)


def _fill(pattern: bytes, numbers: Iterable[bytes]) -> bytes:
    for number in numbers:
        pattern = pattern.replace(WILDCARD, number, 1)
    return pattern


def find_gap(rule: SeriesRule, member: Mapping[bytes, int], mark_ns: int | None, age_s: float) -> str:
    """Return what a member lacks by its rule; empty if nothing.

    `member`: when each of its files changed last, in ns. `mark_ns`: when the file that marks its end did. `age_s`: since the last change.
    """
    last = os.fsencode(rule.last)
    if last and WILDCARD not in last:
        mark_ns = member.get(last)
    if last and mark_ns is None:
        return f"{rule.last} is not there yet"
    if newer := [path for path, changed_ns in member.items() if mark_ns is not None and changed_ns > mark_ns]:
        return f"{rule.last} is older than {min(newer).decode(errors='backslashreplace') or 'it'}: it belongs to the save before"
    if len(member) < rule.files:
        return f"it has {len(member)} files; accepted: {rule.files}, as the rule for {rule.pattern} says"
    if age_s < rule.quiet_s:
        return f"it was changed {age_s:.0f} s ago; accepted: {rule.quiet_s:g} s, as the rule for {rule.pattern} says"
    return ""
