"""The definitions of a coverage report, written out plainly: the judge of the fast code.

Everything is float64 and a loop; nothing is shared with the package.
"""

from .layer import PlainLayer, head_masses, read_layer
from .pages import PAGE_SELECTORS, TOKEN_ORACLE, budget_pages, eligible_pages
from .profile import PlainGap, PlainPaging, PlainProfile, plain_profile
from .unit import PlainUnit

__all__ = [
    "PAGE_SELECTORS",
    "TOKEN_ORACLE",
    "PlainGap",
    "PlainLayer",
    "PlainPaging",
    "PlainProfile",
    "PlainUnit",
    "budget_pages",
    "eligible_pages",
    "head_masses",
    "plain_profile",
    "read_layer",
]
