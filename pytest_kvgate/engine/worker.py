"""A thread that runs one library call at a time, so that Ctrl-C strikes outside the library.

Python raises what a signal brings (KeyboardInterrupt, a timeout) in the main thread. While that
thread is inside a C library that calls back into Python, the exception would surface in a callback
and vanish there. Here the main thread only waits, in queues written in C that a signal cannot tear.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Worker:
    """Runs calls in a thread of its own; `cancel` makes a running call return early."""

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        self._requests: SimpleQueue[Callable[[], int] | object | None] = SimpleQueue()
        self._replies: SimpleQueue[object] = SimpleQueue()
        thread = threading.Thread(target=self._serve, name="kvgate-decode", daemon=True)
        thread.start()

    def run(self, call: Callable[[], int]) -> int:
        """Return the call's result; an exception in this thread cancels it and awaits its end."""
        try:
            self._requests.put(call)
            result = self._replies.get()
        except BaseException:
            self._cancel()
            self._settle()
            raise
        if isinstance(result, BaseException):
            raise result
        assert isinstance(result, int)
        return result

    def close(self) -> None:
        """Let the thread end."""
        self._requests.put(None)

    def _settle(self) -> None:
        """Wait until nothing is running, whatever signals arrive meanwhile."""
        while True:
            try:
                token = object()
                self._requests.put(token)
                while self._replies.get() is not token:
                    pass
            except KeyboardInterrupt:
                continue
            return

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            if not callable(request):
                self._replies.put(request)
                continue
            try:
                self._replies.put(request())
            except BaseException as error:  # raised again by run()
                self._replies.put(error)
