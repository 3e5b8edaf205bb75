"""Closed loops of small models, and a watch that writes down what went in and out of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pytest_kvgate.analysis.effects import LoopRun, Variant
from pytest_kvgate.closedloop import Loop, LoopSettings, NextToken
from pytest_kvgate.closedloop.sparse import SparseRun
from pytest_kvgate.engine import AttentionHook, AttentionNode, Context, Engine, EngineSettings
from pytest_kvgate.trace import FloatArray
from tests.closedloop.plain import Selection
from tests.models import FIRST_BYTE

Floats = NDArray[np.float32]

F32 = EngineSettings(n_threads=1, cache_type_k="f32", cache_type_v="f32")
F16 = EngineSettings(n_threads=1)


def random_tokens(length: int, seed: int = 3) -> list[int]:
    """Return tokens of the tiny models that say nothing."""
    letters = np.random.default_rng(seed).integers(ord("a"), ord("z") + 1, length)
    return [FIRST_BYTE + int(letter) for letter in letters]


#: On pages of 8 tokens, with 12 sinks and 5% recent, 156 to 167 tokens cross a page boundary, and
#: 10% buys first one page, then two.
PROMPT = random_tokens(155)
CONTINUATION = random_tokens(40, seed=4)
SETTINGS = LoopSettings(n_token=12, sinks=12, recent=0.05)
PAGE_SIZE = 8
BUDGET = 0.1


def follow(tokens: Sequence[int]) -> NextToken:
    """Return a choice of tokens that are known beforehand."""
    return lambda step, _logits: tokens[step]


def likeliest(_step: int, logits: Floats) -> int:
    return int(logits.argmax())


def selection(variant: Variant, settings: LoopSettings = SETTINGS) -> Selection:
    """Return what a variant is, for the plain definitions."""
    return Selection(
        variant.selector, variant.budget, variant.page_size, settings.sinks, settings.recent
    )


@contextmanager
def open_loop(
    model: Path,
    tokens: Sequence[int] = PROMPT,
    next_token: NextToken | None = None,
    settings: LoopSettings = SETTINGS,
    engine: EngineSettings = F32,
) -> Iterator[Loop]:
    """Read a prompt with a model, and close it again."""
    with Engine(model, engine) as opened:
        yield Loop(opened, tokens, next_token or follow(CONTINUATION), settings)


@dataclass(frozen=True)
class Decoded:
    """One decode call: the tokens, and the logits after them."""

    n_before: int
    tokens: list[int]
    logits: Floats


@dataclass(frozen=True)
class Edited:
    """One attention node: what it saw, and its softmax before and after an edit.

    With flash attention there are the values and the output that was written, if any.
    """

    n_visible: int
    ordinal: int
    queries: Floats
    keys: FloatArray
    before: Floats | None
    after: Floats | None
    values: FloatArray | None
    output: Floats | None

    @property
    def softmax(self) -> tuple[Floats, Floats]:
        """The softmax of the visible positions before and after, ``[n_head, n_visible]``."""
        assert self.before is not None
        assert self.after is not None
        return self.before[:, : self.n_visible], self.after[:, : self.n_visible]


@dataclass
class Watch:
    """Writes down every decode call and every attention node that was handed over."""

    decoded: list[Decoded] = field(default_factory=list)
    edited: list[Edited] = field(default_factory=list)
    n_visible: int = 0

    def run(self, loop: Loop, variant: Variant) -> LoopRun:
        """Run a variant and forget what was before it."""
        self.clear()
        return loop.run(variant)

    def clear(self) -> None:
        self.decoded, self.edited = [], []

    @property
    def logits(self) -> list[Floats]:
        """The logits after each single token."""
        return [call.logits for call in self.decoded if len(call.tokens) == 1]


def watching(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Watch every loop of a test."""
    seen = Watch()
    _ask_for_queries(monkeypatch)
    _watch_decode(seen, monkeypatch)
    _watch_edit(seen, monkeypatch)
    return seen


def _ask_for_queries(patch: pytest.MonkeyPatch) -> None:
    """Have q handed over whether a run needs it or not."""
    steer = AttentionHook.steer

    def always(
        hook: AttentionHook, on_node: Callable[[AttentionNode], None], *, with_queries: bool
    ) -> None:
        del with_queries
        steer(hook, on_node, with_queries=True)

    patch.setattr(AttentionHook, "steer", always)


def _watch_decode(seen: Watch, patch: pytest.MonkeyPatch) -> None:
    decode = Context.decode

    def watched(context: Context, tokens: Sequence[int]) -> Floats:
        before = context.n_token
        seen.n_visible = before + len(tokens)
        logits = decode(context, tokens)
        seen.decoded.append(Decoded(before, list(tokens), logits.copy()))
        return logits

    patch.setattr(Context, "decode", watched)


def _watch_edit(seen: Watch, patch: pytest.MonkeyPatch) -> None:
    edit = SparseRun.edit

    def watched(run: SparseRun, node: AttentionNode) -> None:
        n_visible = seen.n_visible
        assert node.queries is not None
        before = after = values = None
        written: list[Floats] = []
        if node.open_softmax is not None:
            before = node.open_softmax().copy()
        if node.read_values is not None:
            values = node.read_values(0, n_visible).copy()
        edit(run, _noting(node, written))
        if node.open_softmax is not None:
            after = node.open_softmax().copy()
        seen.edited.append(
            Edited(
                n_visible,
                node.ordinal,
                node.queries,
                node.read_keys(0, n_visible).copy(),
                before,
                after,
                values,
                written[0] if written else None,
            )
        )

    patch.setattr(SparseRun, "edit", watched)


def _noting(node: AttentionNode, written: list[Floats]) -> AttentionNode:
    write: Callable[[Floats], None] | None = node.write_output
    if write is None:
        return node

    def note(output: Floats) -> None:
        written.append(output.copy())
        write(output)

    return replace(node, write_output=note)
