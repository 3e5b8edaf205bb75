"""Tiny natively sparse models: a dense one, with an indexer that selects what attention reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np

from tests.models import N_EMBD, N_LAYER, WINDOW, Array, tiny_model

#: Heads of the indexer, and their dims, a power of two.
INDEXER_HEADS, INDEXER_DIM = 4, 64

#: How a mixture of experts weighs them.
SIGMOID, SQRT_SOFTPLUS = 2, 4

Value = bool | int | float | list[int]


def with_metadata(path: Path, dense: Path, values: Mapping[str, Value]) -> Path:
    """Copy a model, with more metadata below its architecture's name."""
    reader = gguf.GGUFReader(dense)
    return _rewrite(path, reader, _architecture(reader), values, _tensors(reader))


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

    tensors = _tensors(reader)
    for layer in range(N_LAYER if architecture == "deepseek32" else 1):
        block = f"blk.{layer}.indexer"
        tensors[f"{block}.k_norm.weight"] = np.ones(INDEXER_DIM, dtype=np.float32)
        tensors[f"{block}.k_norm.bias"] = np.zeros(INDEXER_DIM, dtype=np.float32)
        tensors[f"{block}.proj.weight"] = matrix(INDEXER_HEADS, N_EMBD)
        tensors[f"{block}.attn_k.weight"] = matrix(INDEXER_DIM, N_EMBD)
        tensors[f"{block}.attn_q_b.weight"] = matrix(INDEXER_HEADS * INDEXER_DIM, int(n_query))
    values = _indexer(top_k) | {"expert_gating_func": SIGMOID}
    if architecture == "glm-dsa":
        values["attention.indexer.types"] = [1, 0]
    return _rewrite(path, reader, architecture, values, tensors)


def _indexer(top_k: int) -> dict[str, Value]:
    return {
        "attention.indexer.head_count": INDEXER_HEADS,
        "attention.indexer.key_length": INDEXER_DIM,
        "attention.indexer.top_k": top_k,
    }


def compressed_model(path: Path, *, top_k: int) -> Path:
    """Write a ``deepseek4`` model, whose second and third layer attend to compressed keys, too.

    Its first layer attends to a sliding window only.
    """
    reader = gguf.GGUFReader(tiny_model(path.with_suffix(".dense"), "llama"))
    n_head, head_dim, n_query, n_expert, n_ff, n_group, group_rank = 2, 64, 24, 2, 32, 2, 16
    streams, n_turned, ratios = 4, 32, [0, 4, 128]
    mixed, width = (2 + streams) * streams, streams * N_EMBD
    matrices: dict[str, tuple[int, ...]] = {"output_hc_fn.weight": (streams, width)}
    vectors = {"output_hc_base.weight": streams, "output_hc_scale.weight": 1}
    for layer, ratio in enumerate(ratios):
        block = f"blk.{layer}"
        shapes: dict[str, tuple[int, ...]] = {
            "attn_q_a": (n_query, N_EMBD),
            "attn_q_b": (n_head * head_dim, n_query),
            "attn_kv": (head_dim, N_EMBD),
            "attn_output_a": (group_rank * n_group, n_head * head_dim // n_group),
            "attn_output_b": (N_EMBD, n_group * group_rank),
            "hc_attn_fn": (mixed, width),
            "hc_ffn_fn": (mixed, width),
            "ffn_gate_inp": (n_expert, N_EMBD),
            "ffn_gate_exps": (n_expert, n_ff, N_EMBD),
            "ffn_up_exps": (n_expert, n_ff, N_EMBD),
            "ffn_down_exps": (n_expert, N_EMBD, n_ff),
            "ffn_gate_shexp": (n_ff, N_EMBD),
            "ffn_up_shexp": (n_ff, N_EMBD),
            "ffn_down_shexp": (N_EMBD, n_ff),
        }
        lengths = {
            "attn_norm": N_EMBD,
            "ffn_norm": N_EMBD,
            "attn_sinks": n_head,
            "attn_q_a_norm": n_query,
            "attn_kv_a_norm": head_dim,
            "hc_attn_base": mixed,
            "hc_ffn_base": mixed,
            "hc_attn_scale": 3,
            "hc_ffn_scale": 3,
        }
        compressed = {4: {"attn": head_dim, "indexer": INDEXER_DIM}, 128: {"attn": head_dim}}
        for name, n_dim in compressed.get(ratio, {}).items():
            n_out = 2 * n_dim if ratio == 4 else n_dim
            shapes |= dict.fromkeys(
                (f"{name}_compressor_kv", f"{name}_compressor_gate"), (n_out, N_EMBD)
            )
            shapes[f"{name}_compressor_ape"] = (ratio, n_out)
            lengths[f"{name}_compressor_norm"] = n_dim
        if ratio == 4:
            shapes["indexer.proj"] = (INDEXER_HEADS, N_EMBD)
            shapes["indexer.attn_q_b"] = (INDEXER_HEADS * INDEXER_DIM, n_query)
        matrices |= {f"{block}.{name}.weight": shape for name, shape in shapes.items()}
        vectors |= {f"{block}.{name}.weight": length for name, length in lengths.items()}
        vectors[f"{block}.exp_probs_b.bias"] = n_expert
    rng = np.random.default_rng(6)
    tensors = {
        name: rng.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)
        for name, shape in matrices.items()
    }
    tensors |= {name: np.ones(length, dtype=np.float32) for name, length in vectors.items()}
    tensors |= {
        tensor.name: tensor.data for tensor in reader.tensors if not tensor.name.startswith("blk.")
    }
    values = _indexer(top_k) | {
        "block_count": len(ratios),
        "attention.head_count": n_head,
        "attention.head_count_kv": 1,
        "attention.compress_rope_freq_base": 160000.0,
        "attention.compress_ratios": ratios,
        "attention.output_group_count": n_group,
        "attention.output_lora_rank": group_rank,
        "attention.q_lora_rank": n_query,
        "attention.sliding_window": WINDOW,
        "rope.dimension_count": n_turned,
        "hyper_connection.count": streams,
        "hyper_connection.sinkhorn_iterations": 2,
        "hyper_connection.epsilon": 1e-6,
        "hash_layer_count": 0,
        "swiglu_clamp_exp": 10.0,
        "expert_count": n_expert,
        "expert_used_count": n_expert,
        "expert_shared_count": 1,
        "expert_feed_forward_length": n_ff,
        "expert_weights_scale": 1.0,
        "expert_weights_norm": True,
        "expert_gating_func": SQRT_SOFTPLUS,
    }
    return _rewrite(path, reader, "deepseek4", values, tensors)


def _architecture(reader: gguf.GGUFReader) -> str:
    return str(reader.fields["general.architecture"].contents())


def _tensors(reader: gguf.GGUFReader) -> dict[str, Array]:
    return {tensor.name: tensor.data for tensor in reader.tensors}


def _rewrite(
    path: Path,
    reader: gguf.GGUFReader,
    architecture: str,
    values: Mapping[str, Value],
    tensors: Mapping[str, Array],
) -> Path:
    """Write a model under another architecture's name, with other tensors.

    ``values`` below that name are added to its metadata, or stand for what is there.
    """
    old = _architecture(reader)
    writer = gguf.GGUFWriter(path, architecture)
    for name, field in reader.fields.items():
        key = name.replace(f"{old}.", f"{architecture}.", 1)
        ours = name.startswith("GGUF.") or name == "general.architecture"
        if ours or key.removeprefix(f"{architecture}.") in values:
            continue
        items = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(key, field.contents(), field.types[0], sub_type=items)
    for name, value in values.items():
        key = f"{architecture}.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_float32(key, value)
    for name, data in tensors.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
