"""What a check of `ckptfs doctor` says. Values only."""

from dataclasses import dataclass

GOOD, NOTE, BAD = "ok", "note", "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """One result: GOOD, NOTE (works, with less) or BAD, a sentence, and how to mend it."""

    name: str
    verdict: str
    what: str
    remedy: str = ""
