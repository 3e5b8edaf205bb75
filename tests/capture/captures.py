"""Real captures of tiny models, kept for all tests that look at them."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from pytest_kvgate.analysis import verify_capture
from pytest_kvgate.capture import CaptureSettings, Prompt, capture
from pytest_kvgate.engine import EngineSettings
from pytest_kvgate.trace import Reference, Trace, Verification
from tests.models import HEAD_DIM, Array, Shape, tiny_model

STEPS = range(0, 17, 8)


def random_text(length: int, seed: int = 3) -> str:
    letters = np.random.default_rng(seed).integers(ord("a"), ord("z") + 1, length)
    return bytes(letters.tolist()).decode()


def assert_same_arrays(found: Trace, expected: Trace) -> None:
    """Assert that two captures sampled the same steps and hold the same bits."""
    assert found.steps == expected.steps
    for layer, other in zip(found.layers, expected.layers, strict=True):
        np.testing.assert_array_equal(layer.k, other.k)
        np.testing.assert_array_equal(layer.q, other.q)


def hadamard() -> Array:
    """Return the orthonormal Sylvester matrix of the head dim."""
    matrix = np.ones((1, 1), dtype=np.float32)
    while len(matrix) < HEAD_DIM:
        matrix = np.kron(np.array([[1, 1], [1, -1]], dtype=np.float32), matrix)
    return matrix / np.float32(np.sqrt(HEAD_DIM))


LETTERS = random_text(120)
PROMPT = Prompt("letters", LETTERS)


@dataclass(frozen=True, repr=False)
class Captured:
    """A trace on disk with the reference that it was verified against."""

    model: Path
    trace: Trace
    reference: Reference

    @property
    def verification(self) -> Verification:
        assert self.trace.verification is not None
        return self.trace.verification


@dataclass(repr=False)
class Captures:
    """Captures on demand below ``folder``, once per combination of arguments."""

    folder: Path
    _models: dict[tuple[str, Shape | None], Path] = field(default_factory=dict)
    _captured: dict[tuple[Path, Prompt, CaptureSettings], Captured] = field(default_factory=dict)

    def model(self, architecture: str, shape: Shape | None = None) -> Path:
        """Return a tiny model."""
        key = (architecture, shape)
        if key not in self._models:
            path = self.folder / f"{architecture}-{len(self._models)}.gguf"
            self._models[key] = tiny_model(path, architecture, shape=shape)
        return self._models[key]

    def __call__(
        self,
        architecture: str = "llama",
        cache_type_k: str = "f16",
        *,
        shape: Shape | None = None,
        steps: range = STEPS,
        prompt: Prompt = PROMPT,
        values: bool = False,
        cache_type_v: str = "f16",
        flash_attention: bool = False,
        prove: bool = False,
    ) -> Captured:
        """Return the capture of a tiny model."""
        engine = EngineSettings(
            n_threads=1,
            cache_type_k=cache_type_k,
            cache_type_v=cache_type_v,
            flash_attention=flash_attention,
        )
        settings = CaptureSettings(steps=steps, engine=engine, values=values, prove=prove)
        return self.of(self.model(architecture, shape), prompt, settings)

    def of(self, model: Path, prompt: Prompt, settings: CaptureSettings) -> Captured:
        """Return the capture of a model file."""
        key = (model, prompt, settings)
        if key not in self._captured:
            kept: list[Reference] = []
            folder = Path(tempfile.mkdtemp(prefix="reference-", dir=self.folder))

            def verify(trace: Trace, reference: Reference) -> Verification:
                kept.append(_copy(reference, folder))
                return verify_capture(trace, reference)

            trace = capture(model, prompt, settings, self.folder / "traces", verify)
            self._captured[key] = Captured(model, trace, kept[0])
        return self._captured[key]


def _copy(reference: Reference, folder: Path) -> Reference:
    softmax = tuple(
        tuple(Path(shutil.copy(path, folder)) for path in paths) for paths in reference.softmax
    )
    values = reference.values
    if values is not None:
        values = tuple(Path(shutil.copy(path, folder)) for path in values)
    return replace(reference, softmax=softmax, values=values)
