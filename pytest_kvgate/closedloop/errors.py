"""What can go wrong in a closed loop."""


class ClosedLoopError(RuntimeError):
    """A closed loop that cannot be run; the message says why and what to do."""
