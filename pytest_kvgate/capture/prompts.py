"""Prompts: what the model reads before its decode steps are sampled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pytest_kvgate.capture.errors import CaptureError


@dataclass(frozen=True)
class Prompt:
    """A prompt by name; its content, a text or token ids, never reaches a trace or a report."""

    name: str
    content: str | tuple[int, ...]


def read_prompt(path: Path) -> Prompt:
    """Read a UTF-8 text file; its name without suffix names the workload.

    Raises:
        CaptureError: the file is missing, not UTF-8 text, or empty.
    """
    try:
        text = path.read_bytes().decode("utf-8")  # line ends stay as they are
    except UnicodeDecodeError as error:
        raise CaptureError(
            f"prompt {path} is not UTF-8 text (byte {error.start}). Save it as UTF-8."
        ) from error
    except OSError as error:
        raise CaptureError(
            f"prompt {path} cannot be read ({error.strerror}); a text file is needed."
        ) from error
    if not text.strip():
        raise CaptureError(f"prompt {path} is empty; a text of many pages is needed.")
    return Prompt(path.stem, text)
