"""What attention to a selection does to the next token: KL, top-1 agreement, NLL.

The measures of a closed loop. KL is ``Σ p·(log p − log p')`` in nats (Kullback and Leibler, 1951),
from the dense run's distribution to the sparse one's; NLL is the negative log-likelihood of the
token that followed. Their means are over predicted tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.analysis.estimates import Interval, Samples, estimate, interval
from pytest_kvgate.analysis.profile import UndefinedError

#: Measures of the effect on the next token; of top-1 agreement more is better.
EffectMeasure = Literal["kl", "top1", "nll_increase"]
EFFECT_MEASURES: tuple[EffectMeasure, ...] = ("kl", "top1", "nll_increase")


@dataclass(frozen=True)
class Variant:
    """One way to attend: which pages, how many, chosen by whom, and in which layers not at all.

    ``page_size`` is in tokens, ``budget`` a fraction of the context; ``dense_layers`` are indices
    of layers that attend to everything.
    """

    page_size: int
    budget: float
    selector: str
    dense_layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class TokenEffects:
    """The effect on each predicted token, arrays ``[n_token]``.

    ``kl`` is in nats, ``agrees`` whether the likeliest token is the same, ``nll_dense`` and
    ``nll_sparse`` the negative log-likelihood of the token that followed; ``trace`` is the number
    of the prompt, and ``position`` the number of the prediction.
    """

    kl: NDArray[np.float64]
    agrees: NDArray[np.bool_]
    nll_dense: NDArray[np.float64]
    nll_sparse: NDArray[np.float64]
    trace: NDArray[np.int64]
    position: NDArray[np.int64]

    @classmethod
    def joined(cls, parts: Sequence[TokenEffects]) -> TokenEffects:
        """Join the effects on several prompts, which are numbered in this order."""
        numbered = [
            replace(part, trace=np.full_like(part.trace, number))
            for number, part in enumerate(parts)
        ]
        arrays = {
            field.name: np.concatenate([getattr(part, field.name) for part in numbered])
            for field in fields(cls)
        }
        return cls(**arrays)

    def values(self, measure: EffectMeasure) -> NDArray[np.float64]:
        """Return one measure per token, ``[n_token]`` float64."""
        if measure == "kl":
            return self.kl
        if measure == "top1":
            return self.agrees.astype(np.float64)
        return self.nll_sparse - self.nll_dense

    def mean(self, measure: EffectMeasure) -> float:
        """Return the mean over tokens."""
        return estimate(self._samples(measure), "mean")

    def interval(self, measure: EffectMeasure, confidence: float = 0.95) -> Interval | None:
        """Return the bootstrap interval of the mean: over prompts from five on, else over tokens.

        None where there is one token only. That of a top-1 agreement is widened to Wilson's score
        interval (1927) over tokens: resampling what all agrees would be sure of it.
        """
        found = interval(self._samples(measure), "mean", confidence)
        if measure != "top1" or found is None:
            return found
        low, high = _wilson(self.mean("top1"), len(self.agrees), confidence)
        return replace(found, low=min(found.low, low), high=max(found.high, high))

    def _samples(self, measure: EffectMeasure) -> Samples:
        n_token = len(self.kl)
        return Samples(
            value=self.values(measure),
            weight=np.ones(n_token),
            layer=np.zeros(n_token, dtype=np.int64),
            trace=self.trace,
            decode_index=self.position,
            ascending=measure == "top1",
        )


@dataclass(frozen=True)
class LayerShare:
    """What one layer's pages held in a sparse run, as sums over its units.

    ``coverage`` is summed over the ``n_unit`` units with eligible mass, and ``lost``, the share of
    all mass that was not attended to, over all ``n_step`` steps and KV heads.
    """

    coverage: float = 0.0
    n_unit: int = 0
    lost: float = 0.0
    n_step: int = 0

    def __add__(self, other: LayerShare) -> LayerShare:
        return LayerShare(
            self.coverage + other.coverage,
            self.n_unit + other.n_unit,
            self.lost + other.lost,
            self.n_step + other.n_step,
        )


@dataclass(frozen=True)
class LoopRun:
    """One sparse run: its effects, and what the pages held in it, by layer index."""

    effects: TokenEffects
    layers: Mapping[int, LayerShare]

    @property
    def coverage(self) -> float | None:
        """Mean coverage over the units of this run; None where none had any eligible mass."""
        total = sum(self.layers.values(), LayerShare())
        return total.coverage / total.n_unit if total.n_unit else None

    @classmethod
    def joined(cls, parts: Sequence[LoopRun]) -> LoopRun:
        """Join the runs of several prompts."""
        layers: dict[int, LayerShare] = {}
        for part in parts:
            for layer, share in part.layers.items():
                layers[layer] = layers.get(layer, LayerShare()) + share
        return cls(TokenEffects.joined([part.effects for part in parts]), layers)


@dataclass(frozen=True)
class ClosedLoop:
    """The sparse runs of one model beside the dense one.

    ``noise`` is the effect of an edit that changes nothing: everything was selected. What is not
    larger is no effect. ``sparse_tail`` tokens of each prompt were read sparsely, too; ``fused`` is
    whether with flash attention. ``undefined`` says of each variant that could not be run why.
    ``paged_layers`` are the layers that are sparse where they are not kept dense.
    ``eos_ignored_from`` is the first decode step where the model was kept from ending its text.
    """

    noise: TokenEffects
    runs: Mapping[Variant, LoopRun]
    undefined: Mapping[Variant, str]
    paged_layers: tuple[int, ...]
    sparse_tail: int
    fused: bool
    eos_ignored_from: int | None = None

    @property
    def n_token(self) -> int:
        """How many predicted tokens were compared."""
        return len(self.noise.kl)

    @classmethod
    def joined(cls, parts: Sequence[ClosedLoop]) -> ClosedLoop:
        """Join the closed loops of several prompts; what one of them leaves undefined is so."""
        undefined = {variant: why for part in parts for variant, why in part.undefined.items()}
        runs = {
            variant: LoopRun.joined([part.runs[variant] for part in parts])
            for variant in parts[0].runs
            if variant not in undefined
        }
        return replace(
            parts[0],
            noise=TokenEffects.joined([part.noise for part in parts]),
            runs=runs,
            undefined=undefined,
            eos_ignored_from=min(
                (part.eos_ignored_from for part in parts if part.eos_ignored_from is not None),
                default=None,
            ),
        )

    def noise_level(self, measure: EffectMeasure) -> float:
        """Return what an edit that changes nothing comes to: what is no larger is no effect.

        Rises and falls of the NLL cancel in a mean, so its level is the farther end of the interval
        of that mean.
        """
        mean = self.noise.mean(measure)
        if measure != "nll_increase":
            return mean
        found = self.noise.interval(measure)
        ends = (mean,) if found is None else (mean, found.low, found.high)
        return max(map(abs, ends))

    def run(self, variant: Variant) -> LoopRun:
        """Return one sparse run.

        Raises:
            UndefinedError: it could not be run; the message says why.
            KeyError: nobody asked for it.
        """
        if variant in self.undefined:
            raise UndefinedError(self.undefined[variant])
        return self.runs[variant]

    def variants(self, page_size: int) -> list[Variant]:
        """Return what was asked for at one page size, by dense layers, budget, and as asked."""
        asked = [item for item in (*self.runs, *self.undefined) if item.page_size == page_size]
        return sorted(asked, key=lambda item: (item.dense_layers, item.budget))

    def as_json(self) -> dict[str, Any]:
        """Return plain values, from which `from_json` makes the same again."""
        return {
            "noise": _plain(self.noise),
            "runs": [
                {
                    "variant": list(_key(variant)),
                    "effects": _plain(run.effects),
                    "layers": [
                        [layer, share.coverage, share.n_unit, share.lost, share.n_step]
                        for layer, share in run.layers.items()
                    ],
                }
                for variant, run in self.runs.items()
            ],
            "undefined": [[list(_key(variant)), why] for variant, why in self.undefined.items()],
            "paged_layers": list(self.paged_layers),
            "sparse_tail": self.sparse_tail,
            "fused": self.fused,
            "eos_ignored_from": self.eos_ignored_from,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ClosedLoop:
        """Make a closed loop of what `as_json` returned."""
        return cls(
            noise=_effects(document["noise"]),
            runs={
                _variant(run["variant"]): LoopRun(
                    _effects(run["effects"]),
                    {layer: LayerShare(*sums) for layer, *sums in run["layers"]},
                )
                for run in document["runs"]
            },
            undefined={_variant(key): why for key, why in document["undefined"]},
            paged_layers=tuple(document["paged_layers"]),
            sparse_tail=document["sparse_tail"],
            fused=document["fused"],
            eos_ignored_from=document["eos_ignored_from"],
        )


@dataclass(frozen=True)
class DenseRun:
    """The next-token distributions of the dense run, and the tokens that followed.

    ``log_probabilities`` is ``[n_token, n_vocab]`` float64, ``targets`` ``[n_token]``.
    """

    log_probabilities: NDArray[np.float64]
    targets: NDArray[np.int64]

    @classmethod
    def of(cls, logits: Iterable[NDArray[np.float32]], targets: Sequence[int]) -> DenseRun:
        """Make it from the logits ``[n_vocab]`` of each prediction, and the token that followed."""
        rows = np.stack([_log_softmax(row) for row in logits])
        return cls(rows, np.array(targets, dtype=np.int64))

    def effects(self, sparse: Iterable[NDArray[np.float32]]) -> TokenEffects:
        """Compare with a sparse run's logits ``[n_vocab]``, one after the other."""
        kl, agrees, nll_dense, nll_sparse = [], [], [], []
        for before, logits, target in zip(
            self.log_probabilities, sparse, self.targets, strict=True
        ):
            after = _log_softmax(logits)
            probable = np.exp(before)
            with np.errstate(invalid="ignore"):  # a token that both rule out costs nothing
                terms = np.where(probable > 0, before - after, 0.0)
            # rounding may leave a sum of terms of either sign a little below 0; NaN stays NaN
            kl.append(np.maximum(probable @ terms, 0.0))
            agrees.append(before.argmax() == after.argmax())
            nll_dense.append(-before[target])
            nll_sparse.append(-after[target])
        return TokenEffects(
            kl=np.array(kl),
            agrees=np.array(agrees),
            nll_dense=np.array(nll_dense),
            nll_sparse=np.array(nll_sparse),
            trace=np.zeros(len(kl), dtype=np.int64),
            position=np.arange(len(kl)),
        )


def _wilson(share: float, n: int, confidence: float) -> tuple[float, float]:
    """Return the score interval of a share of n independent cases."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    middle = share + z**2 / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return max(0.0, (middle - half) / (1 + z**2 / n)), min(1.0, (middle + half) / (1 + z**2 / n))


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max()
    shifted -= np.log(np.exp(shifted).sum())
    return shifted


def _key(variant: Variant) -> tuple[int, float, str, list[int]]:
    return variant.page_size, variant.budget, variant.selector, list(variant.dense_layers)


def _variant(key: Sequence[Any]) -> Variant:
    page_size, budget, selector, dense_layers = key
    return Variant(page_size, budget, selector, tuple(dense_layers))


def _plain(effects: TokenEffects) -> dict[str, list[float]]:
    return {field.name: getattr(effects, field.name).tolist() for field in fields(effects)}


def _effects(document: Mapping[str, Any]) -> TokenEffects:
    return TokenEffects(**{name: np.array(values) for name, values in document.items()})
