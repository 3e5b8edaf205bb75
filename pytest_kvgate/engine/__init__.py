"""llama.cpp in this process: loading, decoding, and the hook at the attention operation."""

from pytest_kvgate.engine.attention import AttentionHook, AttentionRead, ValueRead
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
    "ValueRead",
    "check_model_file",
    "require_llama",
]
