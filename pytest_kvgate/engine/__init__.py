"""llama.cpp in this process: loading, decoding, and the hook at the attention operation."""

from pytest_kvgate.engine.attention import AttentionHook, AttentionRead
from pytest_kvgate.engine.errors import EngineError, EngineMissingError
from pytest_kvgate.engine.llama import (
    Engine,
    EngineSettings,
    check_model_file,
    require_llama,
)

__all__ = [
    "AttentionHook",
    "AttentionRead",
    "Engine",
    "EngineError",
    "EngineMissingError",
    "EngineSettings",
    "check_model_file",
    "require_llama",
]
