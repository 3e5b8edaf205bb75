"""Write a tiny model."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from tests.models import alibi, cacheless, dense, experts, latent, recurrent, windowed
from tests.models.parts import (
    BEGIN_OF_TEXT,
    END_OF_TEXT,
    FIRST_BYTE,
    HEAD_DIM,
    N_VOCAB,
    Build,
    Shape,
    Weights,
)


def tiny_model(
    path: Path,
    architecture: str = "llama",
    *,
    shape: Shape | None = None,
    countdown: bool = False,
    chat_template: str | None = None,
    tokenizer: bool = True,
    seed: int = 0,
) -> Path:
    """Write a model of about 1 MB to ``path`` and return it.

    ``countdown`` (llama only) makes a model that follows each byte by the byte before it in the
    alphabet, and "a" by the end of the text. Without ``tokenizer`` it reads token ids alone.
    """
    build, usual = ARCHITECTURES[architecture]
    shape = shape or usual
    weights = Weights(np.random.default_rng(seed))
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(shape.n_context)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layer)
    if tokenizer:
        _add_vocabulary(writer)
    else:
        writer.add_tokenizer_model("none")
        writer.add_vocab_size(N_VOCAB)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    build(writer, weights, shape)
    if countdown:
        _count_down(weights)
    for name, values in weights.tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def token_ids(text: str) -> list[int]:
    """Return the tokens of a text: the leading special one, then its bytes."""
    return [BEGIN_OF_TEXT, *(FIRST_BYTE + byte for byte in text.replace(" ", "▁").encode())]


def _add_vocabulary(writer: gguf.GGUFWriter) -> None:
    kinds = gguf.TokenType
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))])
    writer.add_token_scores([0.0] * N_VOCAB)
    writer.add_token_types([kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * 256])
    writer.add_bos_token_id(BEGIN_OF_TEXT)
    writer.add_eos_token_id(END_OF_TEXT)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)


def _count_down(weights: Weights) -> None:
    embedding = weights.tensors["token_embd.weight"]
    output = weights.tensors["output.weight"]
    output[:] = 0.0
    first, last = FIRST_BYTE + ord("b"), FIRST_BYTE + ord("z")
    output[first - 1 : last] = embedding[first : last + 1]
    output[END_OF_TEXT] = embedding[first - 1]


def _square(n_head: int, n_head_kv: int | None = None, n_layer: int = 2) -> Shape:
    """Return a shape whose heads are as wide as the model, which some architectures ask for."""
    return Shape(n_head, n_head_kv or n_head, n_embd=n_head * HEAD_DIM, n_layer=n_layer)


#: How to write an architecture, and the shape it has unless a test asks for another.
ARCHITECTURES: dict[str, tuple[Build, Shape]] = {
    "llama": (dense.llama, Shape()),
    "stablelm": (dense.stablelm, Shape(n_head=2, n_head_kv=1)),
    "qwen3": (dense.qwen3, Shape()),
    "gemma2": (windowed.gemma2, Shape()),
    "gemma3": (windowed.gemma3, Shape()),
    "gemma4": (windowed.gemma4, Shape(n_layer=4)),
    "bloom": (alibi.bloom, _square(2)),
    "mpt": (alibi.mpt, _square(3)),
    "gpt-oss": (experts.gpt_oss, Shape()),
    "qwen3moe": (experts.qwen3moe, Shape()),
    "llama4": (experts.llama4, Shape(n_layer=4)),
    "deepseek2": (latent.deepseek2, Shape()),
    "plm": (latent.plm, Shape()),
    "mamba": (recurrent.mamba, Shape()),
    "rwkv6": (recurrent.rwkv6, Shape()),
    "jamba": (recurrent.jamba, _square(2, 1, n_layer=3)),
    "granitehybrid": (recurrent.granitehybrid, Shape(n_layer=3)),
    "nemotron_h": (recurrent.nemotron_h, Shape(n_layer=4)),
    "lfm2": (recurrent.lfm2, _square(2, 1, n_layer=3)),
    "qwen35": (recurrent.qwen35, Shape(n_layer=4)),
    "bert": (cacheless.bert, _square(2)),
    "t5": (cacheless.t5, _square(2)),
    "t5encoder": (cacheless.t5encoder, _square(2)),
    "llama-embed": (dense.llama, Shape()),
    "dream": (cacheless.dream, _square(2)),
}
