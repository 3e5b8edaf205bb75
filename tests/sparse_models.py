"""Tiny natively sparse models: a dense one, with an indexer that selects what attention reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np

from tests.models import N_EMBD, N_LAYER, Array, tiny_model

#: Heads of the indexer, and their dims, a power of two.
INDEXER_HEADS, INDEXER_DIM = 4, 64


def with_metadata(path: Path, dense: Path, values: Mapping[str, int | float]) -> Path:
    """Copy a model, with more metadata below ``<architecture>.attention.``."""
    reader = gguf.GGUFReader(dense)
    _rewrite(path, reader, _architecture(reader), values, {})
    return path


def sparse_model(path: Path, architecture: str = "deepseek32", *, top_k: int) -> Path:
    """Write a model with multi-head latent attention to the ``top_k`` tokens of an indexer.

    ``architecture`` is ``deepseek32``, where every layer has an indexer, or ``glm-dsa``, where the
    second layer reuses what the first one selected.
    """
    reader = gguf.GGUFReader(tiny_model(path.with_suffix(".dense"), "deepseek2"))
    n_query = next(t for t in reader.tensors if t.name == "blk.0.attn_q_a_norm.weight").shape[0]
    rng = np.random.default_rng(5)

    def matrix(n_out: int, n_in: int) -> Array:
        return rng.normal(0, n_in**-0.5, (n_out, n_in)).astype(np.float32)

    tensors = {}
    for layer in range(N_LAYER if architecture == "deepseek32" else 1):
        block = f"blk.{layer}.indexer"
        tensors[f"{block}.k_norm.weight"] = np.ones(INDEXER_DIM, dtype=np.float32)
        tensors[f"{block}.k_norm.bias"] = np.zeros(INDEXER_DIM, dtype=np.float32)
        tensors[f"{block}.proj.weight"] = matrix(INDEXER_HEADS, N_EMBD)
        tensors[f"{block}.attn_k.weight"] = matrix(INDEXER_DIM, N_EMBD)
        tensors[f"{block}.attn_q_b.weight"] = matrix(INDEXER_HEADS * INDEXER_DIM, int(n_query))
    values = {
        "indexer.head_count": INDEXER_HEADS,
        "indexer.key_length": INDEXER_DIM,
        "indexer.top_k": top_k,
    }
    _rewrite(path, reader, architecture, values, tensors)
    return path


def _architecture(reader: gguf.GGUFReader) -> str:
    return str(reader.fields["general.architecture"].contents())


def _rewrite(
    path: Path,
    reader: gguf.GGUFReader,
    architecture: str,
    attention: Mapping[str, int | float],
    tensors: Mapping[str, Array],
) -> None:
    """Write a model under another architecture's name, with more metadata and tensors."""
    old = _architecture(reader)
    writer = gguf.GGUFWriter(path, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        key = name.replace(f"{old}.", f"{architecture}.", 1)
        items = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(key, field.contents(), field.types[0], sub_type=items)
    for key, value in attention.items():
        kinds = gguf.GGUFValueType
        kind = kinds.UINT32 if isinstance(value, int) else kinds.FLOAT32
        writer.add_key_value(f"{architecture}.attention.{key}", value, kind)
    if architecture != old:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if architecture == "glm-dsa":
        writer.add_array("glm-dsa.attention.indexer.types", [1, 0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
