"""What a capture samples, and how it runs the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from pytest_kvgate.engine import EngineSettings


@dataclass(frozen=True)
class CaptureSettings:
    """What to sample, and how to run the engine meanwhile.

    ``steps`` are the sampled decode steps; ``n_context`` bounds prompt plus decode steps, None for
    the context the model was trained with. ``values`` also captures V, at the last sampled step.
    ``prove`` runs the model once more without flash attention, along the same tokens, to have its
    softmax; without flash attention the capture itself has it. ``ignore_eos`` keeps greedy decoding
    from ending the text. ``allow_native_sparse`` measures models that select for themselves what
    they attend to.
    """

    steps: range = range(0, 257, 8)
    n_context: int | None = None
    engine: EngineSettings = field(default_factory=EngineSettings)
    values: bool = False
    prove: bool = False
    ignore_eos: bool = False
    allow_native_sparse: bool = False

    @property
    def checked_steps(self) -> tuple[int, ...]:
        """Positions among the sampled steps whose attention is verified: the first and the last."""
        return (0,) if len(self.steps) == 1 else (0, len(self.steps) - 1)
