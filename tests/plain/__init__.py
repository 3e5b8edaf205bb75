"""The definitions of a coverage profile, written out plainly: the judge of the fast code."""

from .profile import PlainProfile, eligible_pages, head_masses, plain_profile, read_layer

__all__ = ["PlainProfile", "eligible_pages", "head_masses", "plain_profile", "read_layer"]
