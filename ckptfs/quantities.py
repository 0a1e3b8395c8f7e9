"""Sizes, counts and durations as text for people."""

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_size(count: float) -> str:
    """Format bytes: "1.5 GiB"."""
    unit = 0
    while count >= 1024 and unit < len(UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.0f} {UNITS[unit]}" if unit == 0 or count >= 100 else f"{count:.1f} {UNITS[unit]}"


def format_count(count: int, noun: str, plural: str = "") -> str:
    """Format a number with its noun: "1 file", "3 files"."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def format_ordinal(number: int) -> str:
    """Format a place in an order: "1st", "10th", "112th"."""
    last = "th" if 10 < number % 100 < 14 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{last}"


def format_duration(seconds: float) -> str:
    """Format seconds: "3.2 s", "5 min", "2 h 10 min"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def format_age(now_ns: int, then_ns: int) -> str:
    """Format how long ago a time was. A time in the future was now."""
    return format_duration(max(0.0, (now_ns - then_ns) / 1e9))
