"""From a model and a prompt to a verified trace."""

from pytest_kvgate.capture.continuation import with_continuation
from pytest_kvgate.capture.control_model import (
    ControlModel,
    control_model,
    control_prompt,
    write_control_model,
)
from pytest_kvgate.capture.controls import Controls, HeadKeys, PageKind, Pattern
from pytest_kvgate.capture.errors import CaptureError
from pytest_kvgate.capture.files import Chat, Message
from pytest_kvgate.capture.prompts import Prompt, read_prompt
from pytest_kvgate.capture.run import Verify, capture
from pytest_kvgate.capture.settings import CaptureSettings

__all__ = [
    "CaptureError",
    "CaptureSettings",
    "Chat",
    "ControlModel",
    "Controls",
    "HeadKeys",
    "Message",
    "PageKind",
    "Pattern",
    "Prompt",
    "Verify",
    "capture",
    "control_model",
    "control_prompt",
    "read_prompt",
    "with_continuation",
    "write_control_model",
]
