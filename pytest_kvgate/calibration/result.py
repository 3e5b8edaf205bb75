"""What a calibration found."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

#: The largest difference between a measured and an expected number that is accepted.
TOLERANCE = 1e-3

#: What stands in the place of a pattern for the whole model, and for the capture itself.
WHOLE_MODEL, CAPTURE = "whole model", "capture"


@dataclass(frozen=True)
class Comparison:
    """One number of one pattern.

    ``selector`` is None for what needs none. ``expected`` and ``measured`` are means over all
    steps and KV heads; where the means agree and a single unit does not, they are that unit's, and
    ``unit`` names it. ``tolerance`` is the largest difference that is accepted.
    """

    pattern: str
    measure: str
    selector: str | None
    expected: float
    measured: float
    unit: str | None = None
    tolerance: float = TOLERANCE

    @property
    def difference(self) -> float:
        """The absolute difference; relative where more than 1 is expected, as of a support."""
        difference = abs(self.measured - self.expected) / max(1.0, abs(self.expected))
        return difference if math.isfinite(difference) else math.inf

    @property
    def ok(self) -> bool:
        """Whether the difference is accepted."""
        return self.difference <= self.tolerance

    def __str__(self) -> str:
        what = self.measure.replace("_", " ")
        of = "" if self.selector is None else f" of {self.selector}"
        at = "" if self.unit is None else f" at {self.unit}"
        return (
            f"{self.pattern}: {what}{of}{at} is {self.measured:.6g}, expected {self.expected:.6g}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return plain values; a number that is not finite is None."""
        values = {**asdict(self), "difference": self.difference, "ok": self.ok}
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in values.items()
        }


@dataclass(frozen=True)
class Calibration:
    """The comparisons of one calibration, or the ``problem`` that kept it from an end.

    ``settings`` say how the engine ran and what was read.
    """

    settings: Mapping[str, Any]
    comparisons: tuple[Comparison, ...] = ()
    problem: str | None = None

    @property
    def calibrated(self) -> bool:
        """Whether every number is as expected."""
        return self.problem is None and bool(self.comparisons) and not self.off

    @property
    def off(self) -> tuple[Comparison, ...]:
        """The comparisons that are not accepted, the worst first."""
        wrong = [comparison for comparison in self.comparisons if not comparison.ok]
        return tuple(sorted(wrong, key=lambda comparison: -comparison.difference))

    @property
    def worst(self) -> float:
        """The largest difference of a number that was computed beforehand."""
        of_patterns = [item for item in self.comparisons if item.pattern != CAPTURE]
        return max((item.difference for item in of_patterns), default=math.inf)

    @property
    def summary(self) -> str:
        """The outcome in one sentence."""
        if self.calibrated:
            patterns = {item.pattern for item in self.comparisons} - {WHOLE_MODEL, CAPTURE}
            return (
                f"instrument calibrated: {len(patterns)} control patterns measured as computed "
                f"beforehand, worst difference {self.worst:.1e}"
            )
        if self.problem is not None or not self.off:
            return f"instrument OFF: {self.problem or 'nothing was compared'}"
        first, *others = self.off
        text = f"instrument OFF: {first}"
        if others:
            names = dict.fromkeys(item.pattern for item in others)
            text += f"; {len(others)} more off ({', '.join(names)})"
        return text

    def as_json(self) -> dict[str, Any]:
        """Return plain values, as a report holds them."""
        return {
            "calibrated": self.calibrated,
            "summary": self.summary,
            "problem": self.problem,
            "worst_difference": self.worst if math.isfinite(self.worst) else None,
            "tolerance": TOLERANCE,
            "settings": dict(self.settings),
            "comparisons": [comparison.as_json() for comparison in self.comparisons],
        }
