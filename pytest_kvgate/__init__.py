"""pytest-kvgate: gate query-selected KV paging on your model before anyone builds it."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import pytest

    kvgate: pytest.MarkDecorator

__all__ = ["kvgate"]


def __getattr__(name: str) -> object:
    # Reading traces must not need pytest, so the marker is looked up when it is asked for.
    if name == "kvgate":
        from pytest_kvgate.options import kvgate  # noqa: PLC0415

        return kvgate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
