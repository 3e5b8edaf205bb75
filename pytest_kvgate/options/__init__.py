"""Every ``--kvgate-*`` option and ini key: declaration, validation, resulting `Settings`.

What they say together is in `pytest_kvgate.options.settings`, imported when it is first needed.
"""

import pytest

from pytest_kvgate.options.table import OPTIONS, Option, add_options, given_on_command_line

#: The marker ``@kvgate(budget=…, min_coverage=…)``.
kvgate = pytest.mark.kvgate

__all__ = ["OPTIONS", "Option", "add_options", "given_on_command_line", "kvgate"]
