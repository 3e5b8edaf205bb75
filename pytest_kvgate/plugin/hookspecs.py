"""Hooks that a ``conftest.py`` or another plugin may implement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_kvgate.analysis import Selector


@pytest.hookspec
def pytest_kvgate_selectors(config: pytest.Config) -> Sequence[Selector]:  # type: ignore[empty-body]
    """Return page selectors of your own, to be measured and gated on by name.

    Called once, after collection, in a session that has gates, uses a kvgate fixture or writes a
    report; what any ``conftest.py`` returns holds for all of it. A ``Selector``
    (``pytest_kvgate.analysis``) is a name with a pure function from queries
    ``[n_step, G, head_dim]`` and ``PageKeys`` to scores ``[n_step, n_page]``, the best page
    highest.

    :param config: The pytest config object.
    :returns: The selectors. A name that is taken is a usage error.
    """
