"""How the text of each option becomes a value; a bad one is a ValueError that says what is good."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

#: K cache types whose rounding of q is known, so that a capture can be verified. q4_1 and q5_1 keep
#: a sum beside each block of q that no rounding of q alone reproduces.
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_0", "q4_0", "iq4_nl")
#: V cache types; the quantized ones need flash attention.
VALUE_CACHE_TYPES = (*CACHE_TYPES, "q5_1", "q4_1")
UNFUSED_VALUE_CACHE_TYPES = ("f32", "f16", "bf16")
VERIFICATIONS = ("capture", "reference")
REPORT_KINDS = ("json",)


@dataclass(frozen=True)
class ReportTarget:
    """One ``--kvgate-report KIND:PATH``."""

    kind: str
    path: Path


def parse_steps(text: str) -> range:
    """Parse ``START:STOP:STRIDE`` (STRIDE optional) into sampled decode steps."""
    try:
        start, stop, stride = (int(part) for part in ([*text.split(":"), "1"])[:3])
        well_formed = text.count(":") in (1, 2)
    except ValueError:
        well_formed = False
    if not well_formed or start < 0 or stride < 1 or stop <= start:
        raise ValueError(
            "needs START:STOP:STRIDE in decode steps, with 0 <= START < STOP and STRIDE >= 1, "
            "such as 0:257:8"
        )
    return range(start, stop, stride)


def parse_budgets(text: str) -> tuple[float, ...]:
    """Parse comma-separated fractions of the context into sorted budgets."""
    try:
        budgets = tuple(sorted({float(part) for part in text.split(",")}))
        valid = all(0 < budget <= 1 for budget in budgets)
    except ValueError:
        valid = False
    if not valid:
        raise ValueError(
            "needs comma-separated fractions of the context, each above 0 and up to 1, such as "
            "0.01,0.02"
        )
    return budgets


def parse_pages(text: str) -> tuple[int, ...]:
    """Parse comma-separated page sizes in tokens."""
    try:
        sizes = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        sizes = (0,)
    if sizes[0] < 1:
        raise ValueError("needs comma-separated page sizes in tokens, 1 or more, such as 16,32")
    return sizes


def parse_pool(text: str) -> float:
    """Parse the size of the LRU pool as a multiple of the pages of one step."""
    pool = _positive(text)
    if not 1 <= pool <= 1000:
        raise ValueError("needs a multiple of the pages of one step, from 1 to 1000, such as 2")
    return pool


def parse_link(text: str) -> float:
    """Parse the speed of a link in GB/s."""
    link = _positive(text)
    if not 1e-3 <= link <= 1e6:
        raise ValueError(
            "needs the speed of the link to host memory in GB/s, from 0.001, such as 25"
        )
    return link


def parse_flag(text: str) -> bool:
    """Parse the value of a switch in an ini file."""
    known = {"1": True, "true": True, "yes": True, "on": True}
    known |= {"0": False, "false": False, "no": False, "off": False}
    if text.strip().lower() not in known:
        raise ValueError("is a switch and needs true or false")
    return known[text.strip().lower()]


def _positive(text: str) -> float:
    """Return a number, or NaN for what is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def parse_selectors(text: str) -> tuple[str, ...]:
    """Parse comma-separated selector names; `check_selectors` knows which there are."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def check_selectors(names: Sequence[str], known: Collection[str]) -> None:
    """Raise ValueError unless all selectors are known."""
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(
            f"names {unknown[0]!r}, which is no selector; accepted: {', '.join(known)}"
        )


def parse_recent(text: str) -> float:
    """Parse the recent window: a fraction below 1, or a whole number of tokens."""
    try:
        recent = float(text)
    except ValueError:
        recent = math.nan
    if not (0 <= recent < 1 or (recent >= 1 and recent.is_integer())):
        raise ValueError(
            "needs a fraction of the context below 1, such as 0.02, or a whole number of tokens"
        )
    return recent


def parse_report(text: str) -> ReportTarget:
    """Parse ``KIND:PATH``; whether a report can be written there is `report_problem`'s to say."""
    kind, colon, path = text.partition(":")
    if kind not in REPORT_KINDS or not colon or not path:
        raise ValueError(f"needs KIND:PATH with KIND one of {', '.join(REPORT_KINDS)}")
    return ReportTarget(kind, Path(path))


def report_problem(path: Path) -> str | None:
    """Say why a report cannot be written there, or return None."""
    try:
        if path.is_dir():
            return f"{path} is a folder; name a file in it"
        if not path.parent.is_dir():
            return f"{path}: {path.parent} is not a folder"
        head = path.read_bytes()[:64] if path.is_file() else b""
    except OSError as error:
        return f"{path}: {error.strerror}"
    if head and b'"kvgate-report/' not in head:
        return f"{path} exists and is not a kvgate report; it is not overwritten. Name another file"
    return None


def parse_cache_type(text: str) -> str:
    """Check the data type of the K cache."""
    if text not in CACHE_TYPES:
        raise ValueError(
            f"is no K cache type that can be verified; accepted: {', '.join(CACHE_TYPES)}"
        )
    return text


def parse_value_cache_type(text: str) -> str:
    """Check the data type of the V cache."""
    if text not in VALUE_CACHE_TYPES:
        raise ValueError(f"is no V cache type; accepted: {', '.join(VALUE_CACHE_TYPES)}")
    return text


def parse_on_off(text: str) -> bool:
    """Parse ``on`` or ``off``."""
    if text not in ("on", "off"):
        raise ValueError("needs on or off")
    return text == "on"


def parse_verification(text: str) -> str:
    """Check what a capture is verified against."""
    if text not in VERIFICATIONS:
        raise ValueError(f"is no verification; accepted: {', '.join(VERIFICATIONS)}")
    return text


def engine_problem(cache_type_v: str, *, flash_attention: bool) -> str | None:
    """Say why the engine cannot run with these together, or return None."""
    if flash_attention or cache_type_v in UNFUSED_VALUE_CACHE_TYPES:
        return None
    return (
        f"a {cache_type_v} V cache needs flash attention (on); accepted without it: "
        f"{', '.join(UNFUSED_VALUE_CACHE_TYPES)}"
    )


def whole_number(minimum: int, unit: str) -> Callable[[str], int]:
    """Return a parser of whole numbers from ``minimum``."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = minimum - 1
        if number < minimum:
            raise ValueError(f"needs a whole number of {unit}, {minimum} or more")
        return number

    return parse
