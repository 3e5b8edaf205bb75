"""Attention to a selection: which pages of one decode step are kept, and the softmax over them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.analysis.selectors import rank

#: A unit with less eligible mass than this is skipped.
LEAST_MASS = 1e-12


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


def token_masses(
    weights: NDArray[np.float32], n_head_kv: int, pages: StepPages
) -> NDArray[np.float32]:
    """Return ``Σ_h p[h, j]`` over the groups, ``[n_head_kv, n_page, page_size]`` float32.

    ``weights`` is ``[n_head, n_token]``, the softmax of one step.
    """
    masses: NDArray[np.float32] = _by_group(weights, n_head_kv, pages).sum(axis=1)
    return masses


def best_pages(scores: NDArray[np.float32], pages: StepPages) -> NDArray[np.bool_]:
    """Return which pages are chosen, ``[n_head_kv, n_page, 1]``, from scores per KV head and page.

    The best score wins; ties go to the lower page.
    """
    return _chosen(scores, pages.chosen)[..., None]


def best_tokens(masses: NDArray[np.float32], pages: StepPages) -> NDArray[np.bool_]:
    """Return which tokens are chosen, ``[n_head_kv, n_page, page_size]``, from their masses."""
    tokens = masses.reshape(len(masses), -1)
    return _chosen(tokens, pages.chosen * pages.size).reshape(masses.shape)


def _by_group(
    weights: NDArray[np.float32], n_head_kv: int, pages: StepPages
) -> NDArray[np.float32]:
    """Return a view of the eligible pages, ``[n_head_kv, G, n_page, page_size]``."""
    return weights[:, pages.positions].reshape(n_head_kv, -1, pages.n_page, pages.size)


def _chosen(scores: NDArray[np.float32], n: int) -> NDArray[np.bool_]:
    kept = np.zeros(scores.shape, dtype=np.bool_)
    np.put_along_axis(kept, rank(scores)[:, :n], True, axis=1)
    return kept


def attend_to(
    weights: NDArray[np.float32],
    kept: NDArray[np.bool_] | None,
    pages: StepPages,
    *,
    has_sink: bool,
) -> NDArray[np.float32]:
    """Return the softmax over what is free or kept, ``[n_head, n_token]`` float32.

    ``weights`` is the softmax over everything. ``kept`` is ``[n_head_kv, n_page, page_size or 1]``,
    None to keep everything. The rest is zeroed and the weights are brought back to a sum of 1; a
    learned sink keeps its place in the denominator, as in the attention-output error.

    Raises:
        ZeroDivisionError: nothing that is kept has a weight, so there is nothing to bring back.
    """
    edited = weights.copy()
    if kept is not None:
        by_group = _by_group(edited, len(kept), pages)  # a view
        by_group *= kept[:, None]
    rest = edited.sum(axis=1, dtype=np.float64)
    if has_sink:
        rest += np.maximum(0.0, 1.0 - weights.sum(axis=1, dtype=np.float64))
    if not (rest > 0).all():
        raise ZeroDivisionError
    edited *= (1.0 / rest).astype(np.float32)[:, None]
    return edited


def unit_shares(
    masses: NDArray[np.float32], kept: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the kept and the eligible mass of each KV head, ``[n_head_kv]`` float64 both."""
    eligible: NDArray[np.float64] = masses.sum(axis=(1, 2), dtype=np.float64)
    held: NDArray[np.float64] = (masses * kept).sum(axis=(1, 2), dtype=np.float64)
    return held, eligible
