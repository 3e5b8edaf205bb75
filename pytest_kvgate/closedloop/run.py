"""One closed loop: a dense run of a prompt, then the same tokens again under each selection."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.analysis import PAGE_SELECTORS, PageGrid, Selector, SelectorError
from pytest_kvgate.analysis.effects import ClosedLoop, DenseRun, LoopRun, TokenEffects, Variant
from pytest_kvgate.analysis.threads import one_blas_thread
from pytest_kvgate.analysis.wording import ranges
from pytest_kvgate.closedloop.caches import kv_caches
from pytest_kvgate.closedloop.errors import ClosedLoopError
from pytest_kvgate.closedloop.layers import learn_layers
from pytest_kvgate.closedloop.sparse import COMES_AND_GOES, SparseCells, SparseRun
from pytest_kvgate.engine import Engine

#: Returns the token of a decode step, from its number and the logits ``[n_vocab]`` before it.
NextToken = Callable[[int, NDArray[np.float32]], int]


@dataclass(frozen=True)
class LoopSettings:
    """What a closed loop compares.

    ``n_token`` predictions are compared. The last ``sparse_tail`` tokens of the prompt are read
    under the selection, too, and then the first prediction counts that follows the prompt; else it
    is the first one after a decode step. ``sinks`` and ``recent`` are those of `PageGrid`;
    ``registry`` are the page selectors by name.
    """

    n_token: int = 64
    sparse_tail: int = 0
    sinks: int = 32
    recent: float = 0.02
    registry: Mapping[str, Selector] = field(default_factory=lambda: PAGE_SELECTORS)

    @property
    def n_decode(self) -> int:
        """How many tokens beyond the prompt are decoded."""
        return self.n_token - (1 if self.sparse_tail else 0)

    def grid(self, page_size: int) -> PageGrid:
        """Return the page grid of one page size, in tokens."""
        return PageGrid(page_size, self.sinks, self.recent)


class Loop:
    """A prompt that was read once, with its dense run, to compare sparse runs with.

    All of them decode the same tokens from the same state; the engine, which must stay open, closes
    the context.

    Args:
        engine: the loaded model.
        tokens: the prompt.
        next_token: chooses the tokens of the dense run, which all others follow.
        settings: how many tokens, and which positions are free.

    Raises:
        ClosedLoopError: the model cannot be run so, or the prompt is too short.
        EngineError: llama.cpp cannot run or rewind it.
    """

    def __init__(
        self,
        engine: Engine,
        tokens: Sequence[int],
        next_token: NextToken,
        settings: LoopSettings,
    ) -> None:
        self._settings = settings
        self._n_start = len(tokens) - settings.sparse_tail
        if self._n_start < 1:
            raise ClosedLoopError(
                f"the prompt has {len(tokens)} tokens, so its last {settings.sparse_tail} cannot "
                "be read sparsely (--kvgate-sparse-tail) and leave one to be read before."
            )
        self._fused = engine.flash_attention
        n_last = len(tokens) + settings.n_decode
        self._context = engine.start(n_last + 1)
        logits = self._context.decode(tokens[: self._n_start])
        self._start = self._context.checkpoint()
        tail = list(tokens[self._n_start :])
        self.layers = learn_layers(
            self._context,
            [*tail, 0][0],
            engine.sliding_window,
            engine.cache_type_v if self._fused else None,
        )
        self.caches = kv_caches(self.layers, engine)
        self._cells = SparseCells(self.layers, settings.grid, n_last)
        self._inputs: list[int] = []
        self._context.rewind(self._start)
        with one_blas_thread():
            self._dense = self._run_dense(tail, logits, next_token)
            self.noise = self._effects(
                self.dense_logits() if self._fused else self._replayed(self._edit())
            )

    @property
    def paged_layers(self) -> tuple[int, ...]:
        """The layers that are sparse where they are not kept dense, by index."""
        return tuple(sorted({layer.index for layer in self.layers if layer.paged}))

    @property
    def settings(self) -> LoopSettings:
        """What is compared, and which positions are free."""
        return self._settings

    @property
    def n_context(self) -> int:
        """How many tokens the last decode step sees."""
        return self._n_start + len(self._inputs)

    def compare(self, variants: Iterable[Variant]) -> ClosedLoop:
        """Run each variant; those that are not defined are left out, with the reason."""
        undefined: dict[Variant, str] = {}
        runs: dict[Variant, LoopRun] = {}
        for variant in dict.fromkeys(variants):
            problem = self.problem(variant)
            if problem is not None:
                undefined[variant] = problem
                continue
            try:
                runs[variant] = self.run(variant)
            except SelectorError as error:  # of one selector, and no matter of the others
                undefined[variant] = str(error)
        return ClosedLoop(
            noise=self.noise,
            runs=runs,
            undefined=undefined,
            paged_layers=self.paged_layers,
            sparse_tail=self._settings.sparse_tail,
            fused=self._fused,
        )

    def problem(self, variant: Variant) -> str | None:
        """Say why a variant cannot be run, or return None."""
        unknown = sorted(set(variant.dense_layers) - set(self.paged_layers))
        if unknown:
            return (
                f"layer {unknown[0]} of dense_layers={list(variant.dense_layers)} is not paged, so "
                f"it cannot be kept dense. Accepted: {ranges(self.paged_layers)}."
            )
        if set(self.paged_layers) <= set(variant.dense_layers):
            return "every layer is kept dense, so nothing is left to page."
        grid, n_visible = self._settings.grid(variant.page_size), self._n_start + 1
        first, end = grid.eligible(n_visible)
        if first == end:
            return (
                f"at the first sparse step, of {n_visible} tokens, all positions are free, so "
                "there is no page to select. Lengthen the prompt, shorten its sparse tail "
                "(--kvgate-sparse-tail), or use smaller pages."
            )
        if not grid.pages_for(variant.budget, n_visible):
            return grid.shortfall(variant.budget, n_visible)
        return None

    def run(self, variant: Variant) -> LoopRun:
        """Decode the same tokens under a selection that is defined."""
        edit = self._edit(variant)
        with one_blas_thread():
            effects = self._effects(self._replayed(edit))
        return LoopRun(effects, edit.shares)

    def dense_logits(self) -> Iterator[NDArray[np.float32]]:
        """Decode the same tokens with the engine's own attention; yield ``[n_vocab]`` for each."""
        return self._replayed(None)

    def _effects(self, logits: Iterator[NDArray[np.float32]]) -> TokenEffects:
        effects = self._dense.effects(logits)
        if not np.isfinite([effects.kl, effects.nll_dense, effects.nll_sparse]).all():
            raise ClosedLoopError(
                "the model gives a probability of 0 to a token that followed, or that it would "
                "have chosen otherwise, so KL or NLL is not finite. Follow another continuation."
            )
        return effects

    def _edit(self, variant: Variant | None = None) -> SparseRun:
        return SparseRun(self._cells, variant, self._settings.registry)

    def _run_dense(
        self, tail: Sequence[int], logits: NDArray[np.float32], next_token: NextToken
    ) -> DenseRun:
        """Decode with full attention, and keep the tokens for the runs that follow.

        The engine's own flash attention adds up in half precision, which moves its output by more
        than a selection may. So with flash attention the output is computed here in the dense run,
        too, from everything, and the noise is how far the engine's own is from that.
        """
        edit = self._edit() if self._fused else None
        compared, targets = [], []
        for place in range(self._first + self._settings.n_token):
            decode_index = place - len(tail)
            token = tail[place] if decode_index < 0 else next_token(decode_index, logits)
            if place > self._first:
                targets.append(token)
            self._inputs.append(token)
            logits = self._decode(token, edit)
            if place >= self._first:
                compared.append(logits)
        targets.append(next_token(len(self._inputs) - len(tail), logits))
        return DenseRun.of(compared, targets)

    def _replayed(self, edit: SparseRun | None) -> Iterator[NDArray[np.float32]]:
        """Yield the logits of every prediction that is compared, from the same start."""
        self._context.rewind(self._start)
        self._cells.rewind(self._n_start)
        for place, token in enumerate(self._inputs):
            logits = self._decode(token, edit)
            if place >= self._first:
                yield logits

    def _decode(self, token: int, edit: SparseRun | None) -> NDArray[np.float32]:
        """Append one token, its attention edited or left alone; return the logits after it."""
        context = self._context
        if edit is None:
            logits = context.decode([token])
        else:
            edit.begin(context.n_token + 1)
            context.hook.steer(edit.edit, with_queries=edit.needs_queries)
            logits = context.decode([token])
            if context.hook.release() != len(self.layers):
                raise ClosedLoopError(COMES_AND_GOES)
        if not np.isfinite(logits.max()):  # NaN, infinity, or every token ruled out
            raise ClosedLoopError(
                f"after token {context.n_token} the model's logits are no finite numbers."
            )
        return logits

    @property
    def _first(self) -> int:
        """The place among the decoded tokens after which the first prediction is compared."""
        return max(0, self._settings.sparse_tail - 1)
