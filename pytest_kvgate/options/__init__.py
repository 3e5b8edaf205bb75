"""Every ``--kvgate-*`` option and ini key: declaration, validation, and the `Settings` they give."""

import pytest

from pytest_kvgate.options.settings import Settings, resolve_settings
from pytest_kvgate.options.table import OPTIONS, Option, add_options, given_on_command_line

#: The marker ``@kvgate(budget=…, min_coverage=…)``.
kvgate = pytest.mark.kvgate

__all__ = [
    "OPTIONS",
    "Option",
    "Settings",
    "add_options",
    "given_on_command_line",
    "kvgate",
    "resolve_settings",
]
