"""llama.cpp in this process: loading, decoding, and the hook at the attention operation."""

from pytest_kvgate.engine.attention import AttentionHook
from pytest_kvgate.engine.context import LARGEST_BATCH, Checkpoint, Context
from pytest_kvgate.engine.errors import EngineError, EngineMissingError
from pytest_kvgate.engine.llama import (
    Engine,
    EngineSettings,
    check_model_file,
    require_llama,
)
from pytest_kvgate.engine.reads import (
    AttentionNode,
    AttentionRead,
    OutputNode,
    ValueRead,
    visible_span,
)

__all__ = [
    "LARGEST_BATCH",
    "AttentionHook",
    "AttentionNode",
    "AttentionRead",
    "Checkpoint",
    "Context",
    "Engine",
    "EngineError",
    "EngineMissingError",
    "EngineSettings",
    "OutputNode",
    "ValueRead",
    "check_model_file",
    "require_llama",
    "visible_span",
]
