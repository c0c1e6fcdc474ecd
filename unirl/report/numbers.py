"""Numbers as a person reads them: figures, changes, durations, counts."""

from __future__ import annotations

import math

MINUS = "\N{MINUS SIGN}"
PER_CENT_95 = "95\N{NO-BREAK SPACE}%"
NOT_A_NUMBER = "not a number"
POWERS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def figure(value: float) -> str:
    """About four digits: 0.6229, 12.3, 1,024, 2.0e-4."""
    if not math.isfinite(value):
        return NOT_A_NUMBER if math.isnan(value) else ("∞" if value > 0 else f"{MINUS}∞")
    size = abs(value)
    if value == round(value) and size < 1e6:
        text = f"{value:,.0f}"
    elif size < 1e-3 or size >= 1e6:
        text = f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e")
    else:
        text = (
            f"{value:.{max(0, 3 - math.floor(math.log10(size)))}f}" if size >= 1 else f"{value:.4f}"
        )
    return text.replace("-", MINUS)


def reward(value: float) -> str:
    """Three digits after the point, for what is compared by eye."""
    return (
        figure(value) if not math.isfinite(value) or abs(value) >= 100 else _minus(f"{value:.3f}")
    )


def change(value: float) -> str:
    """With its sign."""
    text = reward(value)
    return f"+{text}" if value >= 0 and math.isfinite(value) else text


def duration(seconds: float) -> str:
    """The two largest units: 42 s, 3 min 5 s, 2 h 10 min, 4 d 3 h."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms" if seconds >= 1e-3 else "under 1 ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, name, smaller_size, smaller in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            rest = (whole % size) // smaller_size
            return f"{whole // size} {name}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"


def count(value: float) -> str:
    """950, 12.5 k, 3 M."""
    for size, letter in POWERS:
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g} {letter}"
    return f"{value:.4g}"


def share(fraction: float) -> str:
    """Per cent, with a digit after the point where it is small."""
    return f"{fraction:.0%}" if fraction >= 0.1 or fraction == 0 else f"{fraction:.1%}"


def plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _minus(text: str) -> str:
    return text.replace("-", MINUS)
