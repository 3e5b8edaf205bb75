"""Decode a model for a capture, and where a proof is asked for, a second time beside it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.capture.collector import Collector
from pytest_kvgate.capture.errors import CaptureError
from pytest_kvgate.engine import LARGEST_BATCH, Context, Engine, EngineError, OutputNode
from pytest_kvgate.trace import Step

#: Tokens that two runs decode in turn: the attention outputs of so many wait in memory meanwhile.
PROOF_BATCH = 128


class Decoder:
    """Decodes one sequence; ``prove`` has a `ReferenceRun` follow it."""

    def __init__(self, engine: Engine, n_context: int, *, prove: bool) -> None:
        self._context = engine.start(n_context)
        self._reference = None
        if prove and engine.flash_attention:
            try:
                context = engine.start_unfused(n_context)
            except EngineError as error:
                raise EngineError(
                    "the capture cannot be proved by a run without flash attention; without "
                    f"--kvgate-verify=reference it is smoke-tested only. {error}"
                ) from error
            self._reference = ReferenceRun(self._context, context)

    @property
    def recurrent_layers(self) -> set[int]:
        """The layers that kept a recurrent state at the sampled steps so far."""
        return self._context.hook.recurrent_layers

    def decode(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Append tokens; return the logits ``[n_vocab]`` after the last one."""
        size = LARGEST_BATCH if self._reference is None else PROOF_BATCH
        for start in range(0, len(tokens), size):
            batch = tokens[start : start + size]
            logits = self._context.decode(batch)
            if self._reference is not None:
                self._reference.follow(batch)
        return logits

    def sample(self, token: int, step: Step, collector: Collector) -> NDArray[np.float32]:
        """Append one token at a sampled step, whose attention the collector takes."""
        collector.begin(step)
        wants_values = collector.wants_values
        self._context.hook.arm(collector.take, collector.take_values if wants_values else None)
        logits = self._context.decode([token])
        self._context.hook.disarm()
        if self._reference is not None:
            self._reference.sample(token, collector)
        collector.end()
        return logits


class ReferenceRun:
    """A run without flash attention that follows one with it, token by token.

    The two kinds of attention round differently, and a quantized model makes a tenth of a weight of
    that from layer to layer. So the output of each attention node is carried over from the run that
    is followed: every layer gets the same input in both, writes the same K, and has to come to the
    same softmax. Nothing that was read from the other run's cache is carried over.
    """

    def __init__(self, followed: Context, context: Context) -> None:
        self._context = context
        self._outputs: deque[NDArray[np.float32]] = deque()
        followed.hook.carry(self._keep)
        context.hook.carry(self._replace)

    def follow(self, tokens: Sequence[int]) -> None:
        """Decode what the other run has just decoded."""
        self._context.decode(tokens)
        if self._outputs:
            raise CaptureError(MISMATCH)

    def sample(self, token: int, collector: Collector) -> None:
        """Decode one token at a sampled step, whose softmax and output the collector takes."""
        wants_values = collector.wants_reference_values
        self._context.hook.arm(
            collector.take_reference, collector.take_reference_values if wants_values else None
        )
        self.follow([token])
        self._context.hook.disarm()

    def _keep(self, output: OutputNode) -> None:
        if output.again:
            self._outputs.pop()
        self._outputs.append(output.read())

    def _replace(self, output: OutputNode) -> None:
        if not self._outputs:
            raise CaptureError(MISMATCH)
        output.write(self._outputs.popleft())


MISMATCH = (
    "with and without flash attention the model does not attend in the same places, so one run "
    "cannot prove the other. Capture with --kvgate-flash-attn=off."
)
