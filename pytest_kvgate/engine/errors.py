"""What can go wrong in the engine, as sentences."""


class EngineError(RuntimeError):
    """The model cannot be loaded, decoded or read; the message says what to do."""


class EngineMissingError(EngineError):
    """llama-cpp-python or one of its companions is not installed."""

    def __init__(self, module: str) -> None:
        super().__init__(
            f"capturing a model needs the Python module {module!r}, which is not installed. "
            "Run: pip install 'pytest-kvgate[llama]'"
        )
