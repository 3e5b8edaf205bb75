from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pytest_kvgate.engine import (
    AttentionHook,
    AttentionRead,
    Context,
    Engine,
    EngineSettings,
    ValueRead,
)
from tests.models import HEAD_DIM, N_LAYER, N_VOCAB, token_ids

PROMPT = token_ids("a prompt of some forty tokens for the engine")
TOKEN = 80
SETTINGS = EngineSettings(n_threads=1)


@pytest.fixture
def context(model: Path) -> Iterator[Context]:
    with Engine(model, SETTINGS) as engine:
        opened = engine.start(len(PROMPT) + 400)
        opened.decode(PROMPT)
        yield opened


@pytest.fixture(scope="module")
def expected(model: Path) -> NDArray[np.float32]:
    """Return the logits after the prompt and one token, with no hook armed."""
    with Engine(model, SETTINGS) as engine:
        context = engine.start(len(PROMPT) + 400)
        context.decode(PROMPT)
        return context.decode([TOKEN])


class Raising:
    """Raises at one of the reads of a step."""

    def __init__(self, error: BaseException, after: int = 0) -> None:
        self.error = error
        self.after = after
        self.calls = 0

    def __call__(self, _read: AttentionRead) -> None:
        self.calls += 1
        if self.calls > self.after:
            raise self.error


def test_every_kv_layer_of_a_decode_step_is_reported_once(context: Context) -> None:
    reads: list[AttentionRead] = []
    softmax: list[NDArray[np.float32]] = []

    def take(read: AttentionRead) -> None:
        reads.append(read)
        assert read.read_softmax is not None
        softmax.append(read.read_softmax())

    context.hook.arm(take)
    context.decode([TOKEN])
    assert context.hook.disarm() == N_LAYER
    assert [read.index for read in reads] == list(range(N_LAYER))
    for read, weights in zip(reads, softmax, strict=True):
        assert read.queries.shape == (4, HEAD_DIM)
        assert (read.n_head_kv, read.key_type, read.n_rot) == (2, "f16", HEAD_DIM)
        assert read.scale == 0.125
        assert not read.shared_keys
        n_visible = len(PROMPT) + 1
        assert np.flatnonzero(np.isfinite(read.mask)).tolist() == list(range(n_visible))
        np.testing.assert_allclose(weights[:, :n_visible].sum(axis=1), 1, atol=1e-5)
        assert not weights[:, n_visible:].any()


def test_the_product_with_v_is_reported_after_its_layer_where_it_is_asked_for(
    context: Context,
) -> None:
    order: list[tuple[str, int]] = []
    softmax: list[NDArray[np.float32]] = []

    def take(read: AttentionRead) -> None:
        order.append(("attention", read.index))
        assert read.read_softmax is not None
        softmax.append(read.read_softmax())

    def take_values(read: ValueRead) -> None:
        order.append(("values", read.index))
        n_visible = len(PROMPT) + 1
        values, output = read.read_values(n_visible), read.read_output()
        assert (values.shape, values.dtype.name) == ((2, n_visible, HEAD_DIM), "float16")
        assert (output.shape, output.dtype.name) == ((4, HEAD_DIM), "float32")
        weights = softmax[-1][:, :n_visible].reshape(2, 2, n_visible)
        by_hand = weights @ values.astype(np.float32)
        np.testing.assert_allclose(output, by_hand.reshape(4, HEAD_DIM), atol=2e-3)

    context.hook.arm(take, take_values)
    context.decode([TOKEN])
    assert context.hook.disarm() == N_LAYER
    assert order == [(what, index) for index in range(N_LAYER) for what in ("attention", "values")]


@pytest.mark.parametrize(("values", "n_node"), [(False, 2), (True, 3)])
def test_a_graph_stops_at_the_product_with_v_only_where_it_is_asked_for(
    model: Path, monkeypatch: pytest.MonkeyPatch, values: bool, n_node: int
) -> None:
    called: list[bool] = []
    original = AttentionHook.__call__

    def count(hook: AttentionHook, address: int, ask: bool, user_data: object) -> bool:
        called.append(ask)
        return original(hook, address, ask, user_data)

    monkeypatch.setattr(AttentionHook, "__call__", count)
    with Engine(model, SETTINGS) as engine:
        context = engine.start(len(PROMPT) + 1)
        context.decode(PROMPT)
        called.clear()
        context.hook.arm(lambda _read: None, (lambda _read: None) if values else None)
        context.decode([TOKEN])
    assert called.count(False) == n_node * N_LAYER


def test_what_the_callback_for_values_raises_comes_out_of_decode(context: Context) -> None:
    def fail(_read: ValueRead) -> None:
        raise ValueError("wrong")

    context.hook.arm(lambda _read: None, fail)
    with pytest.raises(ValueError, match="wrong"):
        context.decode([TOKEN])
    assert np.isfinite(context.decode([TOKEN])).all()


def test_listening_to_values_does_not_change_the_logits(
    context: Context, expected: NDArray[np.float32]
) -> None:
    context.hook.arm(lambda _read: None, lambda _read: None)
    np.testing.assert_allclose(context.decode([TOKEN]), expected, atol=1e-4)


def test_listening_does_not_change_the_logits(
    context: Context, expected: NDArray[np.float32]
) -> None:
    context.hook.arm(lambda _read: None)
    logits = context.decode([TOKEN])
    assert logits.shape == (N_VOCAB,)
    np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_a_disarmed_hook_reports_nothing(context: Context) -> None:
    reads: list[AttentionRead] = []
    context.hook.arm(reads.append)
    context.hook.disarm()
    context.decode([TOKEN])
    assert reads == []


def test_arming_anew_starts_a_new_count(context: Context) -> None:
    counts = []
    for _ in range(3):
        context.hook.arm(lambda _read: None)
        context.decode([TOKEN])
        counts.append(context.hook.disarm())
    assert counts == [N_LAYER] * 3


@pytest.mark.parametrize("after", range(N_LAYER))
@pytest.mark.parametrize(
    "error",
    [ValueError("wrong"), KeyboardInterrupt(), SystemExit(3)],
    ids=lambda e: type(e).__name__,
)
def test_what_a_callback_raises_comes_out_of_decode(
    context: Context, error: BaseException, after: int
) -> None:
    callback = Raising(error, after)
    context.hook.arm(callback)
    with pytest.raises(type(error)) as caught:
        context.decode([TOKEN])
    assert caught.value is error
    assert callback.calls == after + 1


def test_after_a_callback_has_raised_no_read_is_reported(context: Context) -> None:
    callback = Raising(ValueError("wrong"))
    context.hook.arm(callback)
    with pytest.raises(ValueError, match="wrong"):
        context.decode([TOKEN])
    assert np.isfinite(context.decode([TOKEN])).all()
    assert callback.calls == 1


@pytest.mark.parametrize("error", [ValueError("wrong"), KeyboardInterrupt()])
def test_the_engine_can_be_armed_again_after_an_error(
    context: Context, error: BaseException
) -> None:
    context.hook.arm(Raising(error))
    with pytest.raises(type(error)):
        context.decode([TOKEN])
    reads: list[AttentionRead] = []
    context.hook.arm(reads.append)
    context.decode([TOKEN])
    assert [read.index for read in reads] == list(range(N_LAYER))


@pytest.mark.parametrize("error", [ValueError("wrong"), KeyboardInterrupt()])
def test_an_engine_opened_after_an_error_decodes_as_if_nothing_had_been(
    model: Path, expected: NDArray[np.float32], error: BaseException
) -> None:
    def fail() -> None:
        with Engine(model, SETTINGS) as engine:
            context = engine.start(len(PROMPT) + 1)
            context.decode(PROMPT)
            context.hook.arm(Raising(error))
            context.decode([TOKEN])

    with pytest.raises(type(error)):
        fail()
    with Engine(model, SETTINGS) as engine:
        context = engine.start(len(PROMPT) + 400)
        context.decode(PROMPT)
        np.testing.assert_array_equal(context.decode([TOKEN]), expected)


def test_closing_twice_is_harmless(model: Path) -> None:
    engine = Engine(model, SETTINGS)
    context = engine.start(16)
    context.hook.arm(Raising(ValueError("wrong")))
    with pytest.raises(ValueError, match="wrong"):
        context.decode([TOKEN])
    engine.close()
    engine.close()


def test_a_signal_within_a_callback_interrupts_decode(context: Context) -> None:
    context.hook.arm(lambda _read: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        context.decode([TOKEN])


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer signal")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_at_any_moment_of_a_sampled_step_interrupts_decode(context: Context) -> None:
    attempts, interrupted = 30, 0
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for attempt in range(attempts):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0005 + 0.0001 * attempt)
                for _ in range(10):
                    context.hook.arm(lambda _read: None)
                    context.decode([TOKEN])
                time.sleep(0.05)
            except KeyboardInterrupt:
                interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted == attempts
