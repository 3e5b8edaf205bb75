"""What a model reads and how far it decodes: refused before anything runs where it cannot be."""

from __future__ import annotations

from pytest_kvgate.capture.errors import CaptureError
from pytest_kvgate.capture.prompts import Prompt, prompt_tokens
from pytest_kvgate.capture.refusals import refuse_cache_type, refuse_unpageable
from pytest_kvgate.capture.settings import CaptureSettings
from pytest_kvgate.engine import Engine


def fitting_tokens(
    engine: Engine,
    name: str,
    prompt: Prompt,
    settings: CaptureSettings,
    n_decode: int,
    remedy: str,
) -> list[int]:
    """Return the prompt's token ids if they and ``n_decode`` decode steps fit into the context.

    ``name`` is the model's; ``remedy`` says how to ask for fewer decode steps.

    Raises:
        CaptureError: they do not fit, or the model cannot be paged or run so.
        EngineError: the model cannot tokenize.
    """
    refuse_unpageable(engine, name)
    refuse_cache_type(engine, name, settings.engine)
    tokens = prompt_tokens(engine, prompt)
    limit = settings.n_context or engine.trained_context
    origin = "--kvgate-ctx" if settings.n_context else "the context the model was trained with"
    if n_decode >= limit:
        raise CaptureError(
            f"{n_decode} decode steps alone do not fit into the context of {limit} tokens "
            f"({origin}). {remedy.capitalize()}, or raise --kvgate-ctx."
        )
    if len(tokens) + n_decode > limit:
        raise CaptureError(
            f"prompt {prompt.name!r} is {len(tokens)} tokens, and with {n_decode} decode steps it "
            f"needs {len(tokens) + n_decode}; the context holds {limit} ({origin}). Shorten the "
            f"prompt to {limit - n_decode} tokens, {remedy}, or raise --kvgate-ctx."
        )
    return tokens
