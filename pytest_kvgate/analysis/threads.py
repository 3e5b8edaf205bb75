"""Work on several KV heads at once, in as many threads as the matrix product would use.

The exponentials and sums of numpy run in one thread each; only its BLAS has more. One head per
thread, with a BLAS of one thread each, keeps all of them busy.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

from threadpoolctl import ThreadpoolController


@dataclass(frozen=True)
class Workers:
    """Threads to hand work to; ``count`` of them."""

    executor: Executor
    count: int


@contextmanager
def workers(most: int) -> Iterator[Workers]:
    """Start up to ``most`` threads, and take the threads of BLAS away meanwhile.

    What limits the threads of BLAS (its environment variables, a CPU affinity) limits these, too.
    """
    controller = _controller()
    blas = [library["num_threads"] for library in controller.info()]
    count = max(1, min(most, max(blas, default=1)))
    limits = 1 if count > 1 else None
    with (
        controller.limit(limits=limits, user_api="blas"),
        ThreadPoolExecutor(count, "kvgate") as executor,
    ):
        yield Workers(executor, count)


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Keep BLAS to one thread, for products too small to share, or beside threads that are busy."""
    with _controller().limit(limits=1, user_api="blas"):
        yield


@cache  # finding the libraries takes milliseconds
def _controller() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")
