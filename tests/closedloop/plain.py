"""The definitions of sparse attention, written out plainly, and a llama model that attends so.

Everything is float64; nothing is shared with the package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.plain import TOKEN_ORACLE, budget_pages, eligible_pages

Reals = NDArray[np.float64]

#: Page selectors that depend on the query or the position alone, and the two oracles.
SELECTORS = (
    "oracle",
    "landmark",
    "quest",
    "mean-std",
    "cuboid-mean",
    "recency",
    TOKEN_ORACLE,
)


@dataclass(frozen=True)
class Selection:
    """What a step attends to: the free positions, and what a selector takes of the pages."""

    selector: str
    budget: float
    page_size: int
    sinks: int
    recent: float

    def pages(self, n: int) -> list[int]:
        return eligible_pages(self.page_size, self.sinks, self.recent, n)

    def chosen(self, n: int) -> int:
        return budget_pages(self.budget, n, self.page_size)

    def tokens(self, page: int) -> range:
        return range(page * self.page_size, (page + 1) * self.page_size)

    def page_masses(self, masses: Reals) -> list[float]:
        """Return the mass of each eligible page, of ``[G, n]``."""
        return [masses[:, self.tokens(page)].sum() for page in self.pages(masses.shape[1])]

    def scores(self, masses: Reals, queries: Reals, keys: Reals) -> list[float]:
        """Return the score of each eligible page, of ``[G, n]``, ``[G, d]`` and ``[n, d]``."""
        if self.selector == "oracle":
            return self.page_masses(masses)
        pages = self.pages(masses.shape[1])
        if self.selector == "recency":
            return [float(page) for page in pages]
        best_head = HEAD_SCORES[self.selector]
        return [
            max(best_head(query, keys[self.tokens(page)]) for query in queries) for page in pages
        ]

    def kept_items(self, masses: Reals, queries: Reals, keys: Reals) -> list[int]:
        """Return the pages that a KV head keeps, or the tokens."""
        n = masses.shape[1]
        if self.selector == TOKEN_ORACLE:
            tokens = [j for page in self.pages(n) for j in self.tokens(page)]
            count, by_token = self.chosen(n) * self.page_size, masses.sum(axis=0).tolist()
            return sorted(tokens, key=lambda j: (-by_token[j], j))[:count]
        pages, scores = self.pages(n), self.scores(masses, queries, keys)
        order = sorted(range(len(pages)), key=lambda place: (-scores[place], place))
        return [pages[place] for place in order[: self.chosen(n)]]

    def kept(self, masses: Reals, queries: Reals, keys: Reals) -> set[int]:
        """Return the eligible positions that a KV head keeps."""
        return self.positions(self.kept_items(masses, queries, keys))

    def positions(self, items: list[int]) -> set[int]:
        """Return the positions of pages, or of tokens where those are kept."""
        if self.selector == TOKEN_ORACLE:
            return set(items)
        return {j for page in items for j in self.tokens(page)}

    def eligible(self, n: int) -> list[int]:
        """Return the positions on eligible pages."""
        return [j for page in self.pages(n) for j in self.tokens(page)]

    def visible(self, n: int, kept: set[int]) -> NDArray[np.bool_]:
        """Return which positions a KV head attends to that keeps some, ``[n]``."""
        hidden = set(self.eligible(n)) - kept
        return np.array([j not in hidden for j in range(n)])

    def coverage(self, masses: Reals, kept: set[int]) -> float:
        """Return the share of the eligible mass that a KV head keeps, of ``[G, n]``."""
        held = masses[:, sorted(kept)].sum()
        return float(held / masses[:, self.eligible(masses.shape[1])].sum())

    def lost(self, masses: Reals, kept: set[int]) -> float:
        """Return the share of the mass of all tokens that a KV head does not attend to."""
        hidden = ~self.visible(masses.shape[1], kept)
        return float(masses[:, hidden].sum() / masses.sum())


def renormalised(masses: Reals, visible: NDArray[np.bool_]) -> Reals:
    """Return attention to what is visible, of ``[G, n]``; what a row lacks is a learned sink's."""
    sink = 1 - masses.sum(axis=1, keepdims=True)
    seen = np.where(visible, masses, 0.0)
    return np.asarray(seen / (seen.sum(axis=1, keepdims=True) + sink))


def _quest(query: Reals, keys: Reals) -> float:
    return float(np.maximum(query * keys.max(axis=0), query * keys.min(axis=0)).sum())


def _mean_std(query: Reals, keys: Reals) -> float:
    return float(query @ keys.mean(axis=0) + np.abs(query) @ keys.std(axis=0))


def _cuboid_mean(query: Reals, keys: Reals) -> float:
    centre = (keys.max(axis=0) + keys.min(axis=0)) / 2
    return float(query @ centre + np.abs(query) @ np.abs(keys - centre).mean(axis=0))


#: What a query head gives a page.
HEAD_SCORES: dict[str, Callable[[Reals, Reals], float]] = {
    "landmark": lambda query, keys: float(query @ keys.mean(axis=0)),
    "quest": _quest,
    "mean-std": _mean_std,
    "cuboid-mean": _cuboid_mean,
}


@dataclass
class Share:
    """What the pages of one layer held, by unit."""

    coverage: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)


@dataclass
class PlainLlama:
    """A llama model, token by token: RMS norms, RoPE on pairs, grouped heads, a gated FFN."""

    path: Path
    keys: list[list[Reals]] = field(default_factory=list)
    values: list[list[Reals]] = field(default_factory=list)
    kept: dict[tuple[int, int, int], list[int]] = field(default_factory=dict)
    shares: dict[int, Share] = field(default_factory=dict)

    def __post_init__(self) -> None:
        reader = gguf.GGUFReader(self.path)
        self.tensors = {item.name: item.data.astype(np.float64) for item in reader.tensors}

        def read(name: str) -> float:
            return float(reader.fields[f"llama.{name}"].contents())

        self.n_layer = int(read("block_count"))
        self.n_head, self.n_head_kv = (
            int(read(f"attention.head_count{kind}")) for kind in ("", "_kv")
        )
        self.head_dim = int(read("attention.key_length"))
        self.epsilon = read("attention.layer_norm_rms_epsilon")
        self.base = read("rope.freq_base")
        self.keys = [[] for _ in range(self.n_layer)]
        self.values = [[] for _ in range(self.n_layer)]

    def branch(self) -> PlainLlama:
        """Return another run that goes on from here."""
        other = copy(self)
        other.keys = [list(rows) for rows in self.keys]
        other.values = [list(rows) for rows in self.values]
        other.kept, other.shares = {}, {}
        return other

    def run(
        self,
        tokens: Sequence[int],
        selection: Selection | None = None,
        dense_layers: Sequence[int] = (),
    ) -> list[Reals]:
        """Append tokens, and return the logits after each."""
        return [self._step(token, selection, dense_layers) for token in tokens]

    def _step(self, token: int, selection: Selection | None, dense_layers: Sequence[int]) -> Reals:
        x: Reals = self.tensors["token_embd.weight"][token]
        for layer in range(self.n_layer):
            chosen = None if layer in dense_layers else selection
            x = x + self._attend(layer, self._norm(x, f"blk.{layer}.attn_norm"), chosen)
            inner = self._norm(x, f"blk.{layer}.ffn_norm")
            gate = self._weight(layer, "ffn_gate") @ inner
            hidden = gate / (1 + np.exp(-gate)) * (self._weight(layer, "ffn_up") @ inner)
            x = x + self._weight(layer, "ffn_down") @ hidden
        logits = self.tensors["output.weight"] @ self._norm(x, "output_norm")
        return np.asarray(logits)

    def _attend(self, layer: int, x: Reals, selection: Selection | None) -> Reals:
        position = len(self.keys[layer])
        queries, keys, values = (
            (self._weight(layer, f"attn_{name}") @ x).reshape(-1, self.head_dim) for name in "qkv"
        )
        self.keys[layer].append(self._turned(keys, position))
        self.values[layer].append(values)
        queries = self._turned(queries, position)
        all_keys, all_values = np.stack(self.keys[layer]), np.stack(self.values[layer])
        outputs: list[Reals] = []
        group = self.n_head // self.n_head_kv
        for kv_head in range(self.n_head_kv):
            of_group = queries[kv_head * group : (kv_head + 1) * group]
            masses = softmax(of_group @ all_keys[:, kv_head].T / np.sqrt(self.head_dim))
            if selection is not None:
                seen = (masses, of_group, all_keys[:, kv_head])
                items = selection.kept_items(*seen)
                self.kept[position + 1, layer, kv_head] = items
                kept = selection.positions(items)
                share = self.shares.setdefault(layer, Share())
                share.coverage.append(selection.coverage(masses, kept))
                share.lost.append(selection.lost(masses, kept))
                masses = renormalised(masses, selection.visible(position + 1, kept))
            outputs.append(masses @ all_values[:, kv_head])
        return np.asarray(self._weight(layer, "attn_output") @ np.concatenate(outputs).ravel())

    def _turned(self, heads: Reals, position: int) -> Reals:
        angles = position * self.base ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        even, odd = heads[:, 0::2], heads[:, 1::2]
        turned = np.empty_like(heads)
        turned[:, 0::2] = even * np.cos(angles) - odd * np.sin(angles)
        turned[:, 1::2] = even * np.sin(angles) + odd * np.cos(angles)
        return turned

    def _norm(self, x: Reals, name: str) -> Reals:
        scaled = x / np.sqrt((x**2).mean() + self.epsilon)
        return np.asarray(scaled * self.tensors[f"{name}.weight"])

    def _weight(self, layer: int, name: str) -> Reals:
        return self.tensors[f"blk.{layer}.{name}.weight"]


def softmax(logits: Reals) -> Reals:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def divergence(dense: Reals, sparse: Reals) -> float:
    """Return ``Σ p·log(p / p')`` of two rows of logits."""
    p, q = softmax(dense), softmax(sparse)
    return float((p * np.log(p / q)).sum())
