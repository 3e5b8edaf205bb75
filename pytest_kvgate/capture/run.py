"""One capture: prefill a prompt, decode, keep what attention read at sampled steps."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

from pytest_kvgate.capture.choice import Choice, Forced, Greedy
from pytest_kvgate.capture.collector import Collector
from pytest_kvgate.capture.continuation import forced_tokens
from pytest_kvgate.capture.decoder import Decoder
from pytest_kvgate.capture.prompts import Prompt
from pytest_kvgate.capture.reading import fitting_tokens
from pytest_kvgate.capture.settings import CaptureSettings
from pytest_kvgate.capture.sparsity import OwnSelections, stated_top_k
from pytest_kvgate.capture.unpaged import unpaged_layers
from pytest_kvgate.engine import Engine
from pytest_kvgate.trace import (
    NativeSparsity,
    Reference,
    Step,
    Trace,
    TraceWriter,
    Verification,
)

#: Compares a fresh trace with the model's own softmax.
Verify = Callable[[Trace, Reference], Verification]


def capture(
    model: Path, prompt: Prompt, settings: CaptureSettings, parent: Path, verify: Verify
) -> Trace:
    """Capture one prompt on one model into a new folder below ``parent``.

    Nothing is left behind when it fails or is interrupted.

    Raises:
        EngineError: the model cannot be loaded or run.
        CaptureError: the prompt does not fit, or the model gives nothing to measure.
    """
    with (
        ThreadPoolExecutor(max_workers=1) as background,
        Engine(model, settings.engine) as engine,
        tempfile.TemporaryDirectory(prefix="kvgate-") as scratch,
    ):
        selections = OwnSelections(stated_top_k(engine), allowed=settings.allow_native_sparse)
        tokens = fitting_tokens(
            engine,
            model.name,
            prompt,
            settings,
            settings.steps[-1] + 1,
            "sample fewer --kvgate-steps",
        )
        choice = _choice(engine, prompt, tokens, settings)
        decoder = Decoder(engine, len(tokens) + settings.steps[-1] + 1, prove=settings.prove)
        state = model.stat()
        digest = background.submit(_sha256, model, state.st_size, state.st_mtime_ns)
        with TraceWriter(parent, f"{model.stem}-{prompt.name}") as writer:
            collector = Collector(writer, Path(scratch), settings, selections)
            _decode(decoder, choice, tokens, settings.steps, collector)
            layers = collector.write_layers(engine.sliding_window)
            trace = writer.write_document(
                model={
                    "name": model.stem,
                    "architecture": engine.architecture,
                    "quantization": _quantization(engine),
                    "file_sha256": digest.result(),
                },
                workload={
                    "name": prompt.name,
                    "n_prompt": len(tokens),
                    "kind": prompt.kind,
                    **choice.as_recorded(),
                },
                capture={
                    **_provenance(engine, settings, collector, selections.found),
                    "unpaged_layers": unpaged_layers(
                        engine.n_layer,
                        layers,
                        collector.shared_layers,
                        decoder.recurrent_layers,
                    ),
                },
                layers=layers,
                steps=collector.steps,
            )
            return writer.commit(verify(trace, collector.reference()))


def _choice(engine: Engine, prompt: Prompt, tokens: list[int], settings: CaptureSettings) -> Choice:
    forced = forced_tokens(engine, prompt, tokens, settings.steps)
    if forced is not None:
        return Forced(forced)
    return Greedy(engine, prompt.name, settings.steps, ignore_eos=settings.ignore_eos)


def _decode(
    decoder: Decoder, choice: Choice, tokens: list[int], steps: range, collector: Collector
) -> None:
    logits = decoder.decode(tokens)
    for index in range(steps[-1] + 1):
        token = choice.token(index, logits)
        if index in steps:
            step = Step(decode_index=index, n_visible=len(tokens) + index + 1)
            logits = decoder.sample(token, step, collector)
        else:
            logits = decoder.decode([token])


def _quantization(engine: Engine) -> str | None:
    from gguf import LlamaFileType  # noqa: PLC0415 - only an extra brings it

    number = engine.metadata("general.file_type")
    try:
        return LlamaFileType(int(number or "")).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        return None


def _provenance(
    engine: Engine,
    settings: CaptureSettings,
    collector: Collector,
    sparsity: NativeSparsity | None,
) -> Mapping[str, Any]:
    steps = settings.steps
    return {
        "backend": "llama-cpp-python",
        "backend_version": engine.version,
        "flash_attention": settings.engine.flash_attention,
        "cache_type_k": settings.engine.cache_type_k,
        "cache_type_v": engine.cache_type_v,
        "values": settings.values,
        "n_gpu_layers": settings.engine.n_gpu_layers,
        "n_threads": engine.n_threads,
        "steps": f"{steps.start}:{steps.stop}:{steps.step}",
        "shared_kv_layers": sorted(collector.shared_layers),
        **({} if sparsity is None else {"native_sparse": sparsity.as_json()}),
    }


@lru_cache(maxsize=8)  # every prompt of a model asks again; the size and time say if it changed
def _sha256(path: Path, _size: int, _modified_ns: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
