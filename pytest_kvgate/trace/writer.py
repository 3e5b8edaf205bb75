"""Write a trace directory: in a hidden folder first, renamed into place only when it is whole."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.trace.model import SCHEMA, Step, Trace, Verification
from pytest_kvgate.trace.reader import load_trace


class TraceWriter:
    """A trace under construction below ``parent``; leaving the context uncommitted deletes it.

    Nothing that exists is overwritten: where ``name`` is taken, ``name-2`` and so on is used.
    """

    def __init__(self, parent: Path, name: str) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        self._parent = parent
        self._name = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:100] or "trace"
        self._partial = Path(tempfile.mkdtemp(prefix=f".{self._name}.partial-", dir=parent))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        shutil.rmtree(self._partial, ignore_errors=True)

    def write_array(self, layer: int, name: str, array: NDArray[Any]) -> None:
        """Write ``layers/<layer>/<name>.npy``."""
        folder = self._partial / "layers" / f"{layer:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / f"{name}.npy", np.ascontiguousarray(array), allow_pickle=False)

    def write_document(
        self,
        *,
        model: Mapping[str, Any],
        workload: Mapping[str, Any],
        capture: Mapping[str, Any],
        layers: Iterable[Mapping[str, Any]],
        steps: Iterable[Step],
    ) -> Trace:
        """Write trace.json without a verification and load the trace where it lies."""
        self._write(
            {
                "schema": SCHEMA,
                "model": dict(model),
                "workload": dict(workload),
                "capture": dict(capture),
                "layers": [dict(layer) for layer in layers],
                "steps": [asdict(step) for step in steps],
                "verification": None,
            }
        )
        return load_trace(self._partial)

    def commit(self, verification: Verification | None) -> Trace:
        """Record the verification, move the folder into place and load it from there."""
        document = json.loads(self._document_path.read_text(encoding="utf-8"))
        if verification is not None:
            document["verification"] = verification.as_json()
        self._write(document)
        self._partial.chmod(0o755)  # mkdtemp makes it private; a saved trace is not
        return load_trace(self._move_into_place())

    @property
    def _document_path(self) -> Path:
        return self._partial / "trace.json"

    def _write(self, document: Mapping[str, Any]) -> None:
        text = json.dumps(document, indent=1, allow_nan=False)
        self._document_path.write_text(text + "\n", encoding="utf-8")

    def _move_into_place(self) -> Path:
        number = 1
        while True:
            target = self._parent / (self._name if number == 1 else f"{self._name}-{number}")
            # rename fails on a folder that has content, so a parallel run cannot be overwritten
            if not target.exists():
                try:
                    return self._partial.rename(target)
                except OSError:
                    if not target.exists():
                        raise
            number += 1
