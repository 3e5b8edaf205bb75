"""Attention to a selection: which pages of one decode step are kept, and the softmax over them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class StepPages:
    """What one decode step may select: the pages ``first`` to ``end`` of ``size`` tokens each.

    ``chosen`` is how many of them a KV head gets.
    """

    size: int
    first: int
    end: int
    chosen: int

    @property
    def positions(self) -> slice:
        """The token positions of the eligible pages."""
        return slice(self.first * self.size, self.end * self.size)

    @property
    def n_page(self) -> int:
        """How many pages are eligible."""
        return self.end - self.first


def page_masses(
    weights: NDArray[np.float32], n_head_kv: int, pages: StepPages
) -> NDArray[np.float32]:
    """Return the mass of each eligible page, ``[n_head_kv, n_page]`` float32.

    ``weights`` is ``[n_head, n_token]``, the softmax of one step.
    """
    by_page = weights[:, pages.positions].reshape(len(weights), pages.n_page, pages.size)
    # a product with ones is the fastest sum over a short axis
    by_head = by_page @ np.ones(pages.size, dtype=np.float32)
    masses: NDArray[np.float32] = by_head.reshape(n_head_kv, -1, pages.n_page).sum(axis=1)
    return masses


def token_masses(
    weights: NDArray[np.float32], n_head_kv: int, pages: StepPages
) -> NDArray[np.float32]:
    """Return the mass of each eligible token, ``[n_head_kv, n_page · page_size]`` float32."""
    eligible = weights[:, pages.positions].reshape(n_head_kv, len(weights) // n_head_kv, -1)
    masses: NDArray[np.float32] = eligible.sum(axis=1)
    return masses


def best(scores: NDArray[np.float32], n: int) -> NDArray[np.bool_]:
    """Return which ``n`` items of each row have the best scores; ties go to the lower one.

    ``scores`` is ``[n_head_kv, n_item]`` float32 without NaN, and so is the shape of the result.
    """
    # few calls decide here: at a single step `rank` takes longer than this sort
    order = np.argsort(-scores, axis=1, kind="stable")[:, :n]
    kept = np.zeros(scores.shape, dtype=np.bool_)
    kept[np.arange(len(scores))[:, None], order] = True
    return kept


def attend_to(
    weights: NDArray[np.float32],
    kept: NDArray[np.bool_] | None,
    pages: StepPages,
    *,
    has_sink: bool,
) -> None:
    """Turn the softmax over everything into that over what is free or kept, in place.

    ``weights`` is ``[n_head, n_token]``. ``kept`` is ``[n_head_kv, n_page]`` for pages or
    ``[n_head_kv, n_page · page_size]`` for tokens; None keeps everything. The rest is zeroed and
    the weights are brought back to a sum of 1; a learned sink keeps its place in the denominator,
    as in the attention-output error.

    Raises:
        ZeroDivisionError: nothing that is kept has a weight, so there is nothing to bring back.
    """
    ones = np.ones(weights.shape[1], dtype=np.float32)
    sink = np.maximum(np.float32(0), 1 - weights @ ones) if has_sink else np.float32(0)
    if kept is not None:
        # a factor per token, and long rows: both are faster than to broadcast over short pages
        n_token = pages.n_page * pages.size
        factors = np.repeat(kept.astype(np.float32), n_token // kept.shape[1], axis=1)
        eligible = weights[:, pages.positions].reshape(len(kept), -1, n_token)  # a view
        eligible *= factors[:, None]
    rest = weights @ ones + sink
    if not rest.all():
        raise ZeroDivisionError
    weights /= rest[:, None]
