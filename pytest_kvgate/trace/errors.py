"""The one error a trace can raise."""


class TraceError(ValueError):
    """A trace that cannot be used: the message names the file, the field and the value."""
