"""From a model and a prompt to a verified trace."""

from pytest_kvgate.capture.errors import CaptureError
from pytest_kvgate.capture.prompts import Prompt, read_prompt
from pytest_kvgate.capture.run import Verify, capture
from pytest_kvgate.capture.settings import CaptureSettings

__all__ = ["CaptureError", "CaptureSettings", "Prompt", "Verify", "capture", "read_prompt"]
