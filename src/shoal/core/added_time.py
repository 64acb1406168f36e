"""Times for people: in ms, and how much longer a step takes than plain PyTorch's."""

from __future__ import annotations

MEASURED_SECONDS = 0.01
"""A single step varies by up to a ms with what else a host does: 10 % of this. Percents of less are of the noise."""
PREDICTED_SECONDS = 1e-3
"""A predicted step is a sum of ops whose times are known to about a us each: of a hundred ops, 10 % of this."""


def added_text(seconds: float, plain_seconds: float, resolved_seconds: float = PREDICTED_SECONDS) -> str:
    """What a step takes more than plain PyTorch's.

    Args:
        seconds: of the step.
        plain_seconds: of plain PyTorch's.
        resolved_seconds: the shortest plain step of which a percentage is given.

    >>> added_text(0.1123, 0.1), added_text(0.08, 0.1), added_text(0.1 - 1e-12, 0.1)
    ('+12.3 %', '-20.0 %', '+0.0 %')
    >>> added_text(0.024, 0.001, MEASURED_SECONDS), added_text(2.5e-4, 2e-4)
    ('+23 ms', '+0.05 ms')
    """
    if plain_seconds >= resolved_seconds:
        return f"{round(100 * (seconds / plain_seconds - 1), 1) + 0.0:+.1f} %"  # no -0.0
    added = round(1e3 * (seconds - plain_seconds), 3) + 0.0
    return f"{added:+.0f} ms" if abs(added) >= 100 else f"{added:+.3g} ms"


def milliseconds(seconds: float) -> str:
    """Seconds in ms, with one to three digits after the point.

    >>> milliseconds(0.0123), milliseconds(0.00012345)
    ('12.3', '0.123')
    """
    count = 1e3 * seconds
    return f"{count:.{3 if count < 1 else 2 if count < 10 else 1}f}"
