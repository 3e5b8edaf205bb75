"""What can go wrong in a capture, as sentences."""


class CaptureError(RuntimeError):
    """This model and this prompt give no trace; the message says why and what to do."""
