"""Models that cannot be gated, refused by the name of the reason before they are run."""

from __future__ import annotations

from pytest_kvgate.capture.errors import CaptureError
from pytest_kvgate.engine import Engine, EngineSettings

#: Architectures whose sliding window is not sliding: a query sees the chunk that it stands in.
CHUNKED = frozenset({"llama4"})

#: Architectures whose V llama.cpp cannot store in the way that flash attention needs.
NEVER_FUSED = frozenset({"plm"})


def refuse_unpageable(engine: Engine, name: str) -> None:
    """Raise CaptureError unless the model attends causally to a KV cache.

    What metadata cannot tell is refused later, when a decode step shows it.
    """
    architecture = engine.architecture
    model = f"{name} ({architecture})"
    if engine.has_encoder and engine.has_decoder:
        raise CaptureError(
            f"{model} is an encoder-decoder: its decoder also attends to a text that was encoded "
            "before, which is no KV cache that grows, so what a pager would do is not defined. "
            "Gate a decoder-only model."
        )
    if engine.is_diffusion:
        raise CaptureError(
            f"{model} is a diffusion model: it fills in a whole text at once, with no KV cache to "
            "decode over, so there is nothing to page. Gate a decoder-only model."
        )
    if engine.has_encoder or engine.model_metadata("attention.causal") == "false":
        raise CaptureError(
            f"{model} is an encoder: every token attends to those after it too, and nothing is "
            "decoded over a KV cache, so there is nothing to page. Gate a decoder-only model."
        )
    if engine.is_recurrent:
        raise CaptureError(
            f"{model} is recurrent in every layer: it keeps a state of fixed size and no KV cache, "
            "so there is nothing to page."
        )
    if architecture in CHUNKED and engine.sliding_window:
        raise CaptureError(
            f"{model} has chunked attention: most of its layers see only the current chunk of "
            f"{engine.sliding_window} tokens, so the last query alone does not say which pages "
            "were in use. That is not supported."
        )


def refuse_cache_type(engine: Engine, name: str, settings: EngineSettings) -> None:
    """Raise CaptureError where llama.cpp cannot keep K of this model as it is asked to.

    Some of these combinations end the whole process in llama.cpp, so they are refused before.
    """
    key_type = settings.cache_type_k
    unfused = not settings.flash_attention
    if engine.has_latent_cache and unfused and key_type not in ("f32", "f16", "bf16"):
        raise CaptureError(
            f"{name} ({engine.architecture}) has latent attention (MLA): llama.cpp keeps K and V "
            f"in one cache of one type, and a {key_type} V needs flash attention. Capture with "
            "--kvgate-cache-type-k=f16, f32 or bf16, or with --kvgate-flash-attn=on."
        )
    if settings.flash_attention and engine.architecture in NEVER_FUSED:
        raise CaptureError(
            f"{name} ({engine.architecture}) cannot run with flash attention: llama.cpp ends the "
            "whole process on this architecture. Capture with --kvgate-flash-attn=off."
        )
    for head_dim in engine.head_dims:
        require_whole_blocks(head_dim, key_type)


def require_whole_blocks(head_dim: int, key_type: str) -> None:
    """Raise CaptureError where a quantized type rounds more dims together than divide a head.

    llama.cpp then lets blocks run from one head into the next, and multiplies too few dims.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # noqa: PLC0415 - only an extra has it

    block, _ = GGML_QUANT_SIZES[GGMLQuantizationType[key_type.upper()]]
    if head_dim % block:
        raise CaptureError(
            f"a head of this model has {head_dim} dims, and a {key_type} K cache rounds {block} of "
            f"them together, which does not divide {head_dim}, so llama.cpp's attention would be "
            "wrong. Capture with --kvgate-cache-type-k=f16, f32 or bf16."
        )


def refuse_windows_alone(spans: set[int], n_visible: int) -> None:
    """Raise CaptureError where no layer sees the whole context.

    ``spans`` are how many positions each layer that attends saw of ``n_visible``.
    """
    if max(spans) < n_visible:
        found = " or ".join(str(span) for span in sorted(spans))
        raise CaptureError(
            f"every layer that attends has a sliding window ({found} of {n_visible} tokens): what "
            "lies before it is never read again and can be dropped, so there is nothing to page."
        )
