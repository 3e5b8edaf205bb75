"""An instrument that is broken on purpose is OFF, and the pattern that shows it is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pytest_kvgate.analysis import PAGE_SELECTORS, heads, masses, selectors
from pytest_kvgate.analysis.masses import GroupSoftmax
from pytest_kvgate.analysis.pages import BlockPages, PageGrid
from pytest_kvgate.analysis.selectors import PageKeys, PageScore
from pytest_kvgate.calibration import Calibration, calibrate
from pytest_kvgate.calibration import run as calibration_run
from pytest_kvgate.calibration.result import CAPTURE, TOLERANCE
from pytest_kvgate.capture import CaptureSettings, Controls
from pytest_kvgate.capture.collector import Collector
from pytest_kvgate.engine import EngineSettings, reads
from pytest_kvgate.trace import Layer, Trace
from tests.calibration.mutants import mutate

SETTINGS = CaptureSettings(engine=EngineSettings(n_threads=1))


@pytest.fixture(scope="module")
def control_trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """The control model as the unbroken engine reads it."""
    return calibration_run._captured(tmp_path_factory.mktemp("control"), SETTINGS, Controls())


@pytest.fixture
def measure(control_trace: Trace, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Calibration]:
    """Calibrate the analysis alone, on a trace that was captured before."""

    def captured(_folder: Path, _settings: CaptureSettings, _controls: Controls) -> Trace:
        return control_trace

    monkeypatch.setattr(calibration_run, "_captured", captured)
    return lambda: calibrate(SETTINGS)


def require_off(outcome: Calibration, pattern: str) -> None:
    """The pattern is named, and is off by far more than what is tolerated."""
    assert not outcome.calibrated
    assert outcome.summary.startswith("instrument OFF: ")
    assert pattern in outcome.summary
    if outcome.problem is None:
        worst = max(item.difference for item in outcome.off if item.pattern == pattern)
        assert worst > 5 * TOLERANCE


def test_the_unbroken_instrument_is_calibrated(measure: Callable[[], Calibration]) -> None:
    outcome = measure()
    assert outcome.calibrated
    assert outcome.summary.startswith("instrument calibrated: 10 control patterns")


ANALYSIS: dict[str, tuple[Callable[..., Any], str, str, str]] = {
    "pages lie half a page further": (
        BlockPages.positions.fget,  # type: ignore[attr-defined]
        "return slice(self.first * size, (self.first + self.n_page) * size)",
        "half = size // 2\n"
        "    return slice(self.first * size + half, (self.first + self.n_page) * size + half)",
        "clustered",
    ),
    "one page of the sinks is eligible": (
        PageGrid.eligible,
        "first = -(-self.sinks // self.page_size)",
        "first = self.sinks // self.page_size",
        "sink",
    ),
    "the first eligible page is left out": (
        PageGrid.eligible,
        "first = -(-self.sinks // self.page_size)",
        "first = -(-self.sinks // self.page_size) + 1",
        "clustered",
    ),
    "one page of the recent window is eligible": (
        PageGrid.eligible,
        "return first, max(first, end)",
        "return first, end + 1",
        "recent",
    ),
    "the last eligible page is left out": (
        PageGrid.eligible,
        "return first, max(first, end)",
        "return first, end - 1",
        "diffuse",
    ),
    "the recent window is not masked": (
        PageGrid.recent_tokens,
        "if self.recent < 1:",
        "if self.recent < 0:",
        "recent",
    ),
    "the recent window is twice as long": (
        PageGrid.recent_tokens,
        "return math.ceil(exact(self.recent) * n_visible)",
        "return 2 * math.ceil(exact(self.recent) * n_visible)",
        "diffuse",
    ),
    "the sinks are not masked": (
        PageGrid.eligible,
        "first = -(-self.sinks // self.page_size)",
        "first = 0",
        "sink",
    ),
    "every ranking is upside down": (
        selectors.rank,
        "bits = (scores + np.float32(0))",
        "bits = np.where(np.isinf(scores), scores, -scores)",
        "clustered",
    ),
    "the oracle is upside down": (
        heads.head_pages,
        "name: page_mass if name == ORACLE",
        "name: -page_mass if name == ORACLE",
        "scattered",
    ),
    "the oracle ranks by landmark's score": (
        heads.head_pages,
        "name: page_mass if name == ORACLE",
        "name: page_scores['landmark'] if name == ORACLE",
        "decoys",
    ),
    "the oracle ranks by the hottest token": (
        heads.head_pages,
        "name: page_mass if name == ORACLE",
        "name: by_page.max(axis=2) if name == ORACLE",
        "decoys",
    ),
    "the token oracle takes the coldest tokens": (
        heads._best_tokens,
        "[:, ::-1]",
        "",
        "scattered",
    ),
    "the budget of a unit is rounded up": (
        PageGrid.pages_for_all,
        "part.numerator * n // (part.denominator * self.page_size)",
        "-(-part.numerator * n // (part.denominator * self.page_size))",
        "diffuse",
    ),
    "the budget of the mean is rounded up": (
        PageGrid.pages_on_grid,
        "return tokens // (len(BUDGET_GRID) * self.page_size)",
        "return -(-tokens // (len(BUDGET_GRID) * self.page_size))",
        "diffuse",
    ),
    "coverage is a share of all mass": (
        heads._held,
        "whole = curve[:, -1:].copy()",
        "whole = np.full_like(curve[:, -1:], pages.n_visible.size)",
        "recent",
    ),
    "the softmax is taken without its maximum": (
        GroupSoftmax._add_tile,
        "top = logits.max(axis=1)",
        "top = 0 * logits.max(axis=1)",
        "diffuse",
    ),
    "tiles of the softmax are not put on one scale": (
        GroupSoftmax.finish,
        "scale = np.where(seen, np.exp(top - highest), 0.0)",
        "scale = np.where(seen, 1.0, 0.0) + 0 * (top - highest)",
        "recent",
    ),
    "the scale of the logits is off by a twentieth": (
        GroupSoftmax.__init__,
        "queries * np.float32(layer.scale)",
        "queries * np.float32(1.05 * layer.scale)",
        "sink",
    ),
    "logits are not scaled": (
        GroupSoftmax.__init__,
        "queries * np.float32(layer.scale)",
        "queries",
        "decoys",
    ),
    "query heads go round the KV heads": (
        Layer.query_heads,
        "return slice(kv_head * group, (kv_head + 1) * group)",
        "return slice(kv_head, None, self.n_head_kv)",
        "opposed",
    ),
    "only the first query head of a group counts": (
        masses.GroupAttention.token_masses,
        "np.matmul(scale[tile][:, None, :], weights)[:, 0]",
        "np.matmul(scale[tile][:, None, :1], weights[:, :1])[:, 0]",
        "opposed",
    ),
}


@pytest.mark.parametrize("name", ANALYSIS)
def test_a_broken_analysis_is_off(
    name: str, measure: Callable[[], Calibration], monkeypatch: pytest.MonkeyPatch
) -> None:
    function, old, new, pattern = ANALYSIS[name]
    mutate(monkeypatch, function, old, new)
    require_off(measure(), pattern)


def upside_down(score: PageScore) -> PageScore:
    return lambda queries, found: -score(queries, found)


def both_parts(
    queries: NDArray[np.float32], middle: NDArray[np.float32], spread: NDArray[np.float32]
) -> NDArray[np.float64]:
    return selectors._best_head(
        np.concatenate([queries, np.abs(queries)], axis=-1),
        np.concatenate([middle, spread], axis=-1),
    )


SCORES: dict[str, tuple[str, PageScore, str]] = {
    "landmark reads the largest keys": ("landmark", selectors.quest, "decoys"),
    "quest reads the mean": ("quest", selectors.landmark, "decoys"),
    "quest reads the minimum": (
        "quest",
        lambda queries, found: selectors._best_head(queries, found.minimum),
        "decoys",
    ),
    "mean-std forgets the deviation": ("mean-std", selectors.landmark, "decoys"),
    "cuboid-mean forgets the radius": (
        "cuboid-mean",
        lambda queries, found: selectors._best_head(queries, found.center),
        "decoys",
    ),
    "landmark takes the worst head": (
        "landmark",
        lambda queries, found: -selectors.landmark(-queries, found),
        "opposed",
    ),
    "landmark takes the mean of the heads": (
        "landmark",
        lambda queries, found: queries.mean(axis=1) @ found.mean.T,
        "opposed",
    ),
    "landmark takes the last head": (
        "landmark",
        lambda queries, found: queries[:, -1] @ found.mean.T,
        "opposed",
    ),
    "landmark takes the median": (
        "landmark",
        lambda queries, found: selectors._best_head(queries, np.median(found.keys, axis=1)),
        "tails",
    ),
    "quest leaves out the last token": (
        "quest",
        lambda queries, found: selectors._best_head(queries, found.keys[:, :-1].max(axis=1)),
        "outliers",
    ),
    "mean-std takes the variance": (
        "mean-std",
        lambda queries, found: both_parts(queries, found.mean, found.deviation**2),
        "outliers",
    ),
    "mean-std takes the mean distance": (
        "mean-std",
        lambda queries, found: both_parts(
            queries, found.mean, np.abs(found.keys - found.mean[:, None]).mean(axis=1)
        ),
        "outliers",
    ),
    "cuboid-mean takes the deviation": (
        "cuboid-mean",
        lambda queries, found: both_parts(queries, found.center, found.deviation),
        "middles",
    ),
    **{
        f"{name} is upside down": (
            name,
            upside_down(PAGE_SELECTORS[name].score),
            "clustered",
        )
        for name in ("landmark", "quest", "mean-std", "cuboid-mean", "recency")
    },
}


@pytest.mark.parametrize("name", SCORES)
def test_a_broken_selector_is_off(
    name: str, measure: Callable[[], Calibration], monkeypatch: pytest.MonkeyPatch
) -> None:
    selector, score, pattern = SCORES[name]
    broken = {**PAGE_SELECTORS, selector: replace(PAGE_SELECTORS[selector], score=score)}
    monkeypatch.setattr("pytest_kvgate.analysis.plan.PAGE_SELECTORS", broken)
    outcome = measure()
    require_off(outcome, pattern)
    assert {item.selector for item in outcome.off} == {selector}


@pytest.mark.parametrize(
    ("summary", "pattern"), [("mean", "decoys"), ("deviation", "decoys"), ("radius", "decoys")]
)
def test_a_broken_page_summary_is_off(
    summary: str,
    pattern: str,
    measure: Callable[[], Calibration],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def first_key(found: PageKeys) -> np.typing.NDArray[np.float32]:
        return found.keys[:, 0]

    monkeypatch.setattr(PageKeys, summary, property(first_key))
    require_off(measure(), pattern)


CAPTURES: dict[str, tuple[Callable[..., Any], str, str, str]] = {
    "KV heads are shifted": (
        Collector.take,
        'write_array(read.index, "k", keys)',
        'write_array(read.index, "k", np.roll(keys, 1, axis=0))',
        "clustered",
    ),
    "rows of K are shifted by one position": (
        Collector.take,
        'write_array(read.index, "k", keys)',
        'write_array(read.index, "k", np.roll(keys, 1, axis=1))',
        "clustered",
    ),
    "query heads are shifted": (
        Collector._write_layer,
        "np.stack(record.queries)",
        "np.roll(np.stack(record.queries), 1, axis=1)",
        "opposed",
    ),
    "queries are of the step before": (
        Collector._write_layer,
        "np.stack(record.queries)",
        "np.roll(np.stack(record.queries), 1, axis=0)",
        "scattered",
    ),
    "a step sees one position less": (
        reads.visible_span,
        "shown = np.flatnonzero(np.isfinite(read.mask))",
        "shown = np.flatnonzero(np.isfinite(read.mask))[:-1]",
        "not the last positions",
    ),
}


@pytest.mark.parametrize("name", CAPTURES)
def test_a_broken_capture_is_off(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, old, new, pattern = CAPTURES[name]
    mutate(monkeypatch, function, old, new)
    outcome = calibrate(SETTINGS)
    require_off(outcome, pattern)
    if outcome.problem is None:
        # the patterns would show it by themselves, too
        assert CAPTURE in {item.pattern for item in outcome.off}
        others = tuple(item for item in outcome.comparisons if item.pattern != CAPTURE)
        require_off(replace(outcome, comparisons=others), pattern)


def test_a_cache_type_that_is_read_in_the_wrong_basis_is_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = "keys = model_basis(read.read_keys(n_visible), read.rotation)"
    mutate(monkeypatch, Collector.take, right, "keys = read.read_keys(n_visible)")
    engine = EngineSettings(n_threads=1, cache_type_k="q8_0")
    require_off(calibrate(CaptureSettings(engine=engine)), "clustered")


def test_a_crash_is_off_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(calibration_run, "write_control_model", full)
    outcome = calibrate(SETTINGS)
    assert not outcome.calibrated
    assert outcome.summary == "instrument OFF: OSError: [Errno 28] No space left on device"
    assert outcome.as_json()["worst_difference"] is None


def test_nothing_compared_is_not_calibrated() -> None:
    assert not Calibration({}).calibrated
    assert Calibration({}).summary == "instrument OFF: nothing was compared"


def test_pages_of_a_unit_that_is_missing_are_off(
    measure: Callable[[], Calibration], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_kvgate.analysis.coverage.LEAST_ELIGIBLE_MASS", 0.2)
    require_off(measure(), "sink")
