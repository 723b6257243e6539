"""The content in force: the tensors of every epoch, as they were sent and as they lie in the engine's memory.

No label is believed.  After every commit each tensor's fingerprint is read from the engine's memory.  All of them
together must be one of the contents that can have been committed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.soak.calls import Calls
from tests.soak.samples import Epoch, Violation
from weight_sync.fingerprint import digest, fingerprint, fingerprint_hex
from weight_sync.tensor_meta import TensorMeta

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Possible:
    """A content that may come into force now.  `label`: a pattern that its label must match."""

    tensors: Tensors
    label: str


def exactly(tensors: Tensors, label: str) -> Possible:
    return Possible(tensors, re.escape(label))


class InForce:
    """`tell` gets epochs and labels; `looked(when)` is called when all epochs in force before `when` are known."""

    def __init__(
        self,
        calls: Calls,
        folder: Path,
        tensors: Tensors,
        tell: Callable[..., None],
        looked: Callable[[float], None],
    ) -> None:
        self._calls = calls
        self._folder = folder
        self._tell = tell
        self._looked = looked
        state = self._state()
        self.epoch: Epoch = state["weight_epoch"]
        self.label: str = state["weight_version"]
        self.tensors = tensors
        self.num_commits = 0
        self._check_content()
        self._announce()

    def look(self, possible: Sequence[Possible] = ()) -> bool:
        """Return whether a commit came into force since the last look.  Raises `Violation` for an impossible one."""
        now = time.monotonic()
        state = self._state()
        changed = state["weight_epoch"] != self.epoch
        if changed:
            self._take(state, possible)
        elif state["weight_version"] != self.label:
            raise Violation(
                f"epoch {self.epoch} was {self.label!r} and is {state['weight_version']!r}: nobody renamed it"
            )
        self._looked(now)
        return changed

    def renamed(self) -> None:
        """Read the name of the weights in force, which may be another one now."""
        state = self._state()
        if state["weight_epoch"] == self.epoch:
            self.label = state["weight_version"]
            self._tell("label", self.epoch, self.label)

    def check(self) -> None:
        """Check the fingerprints of all tensors in memory.  Raises `Violation`."""
        self._check_content()

    def forget(self) -> None:
        """Tell that no answer will come that used an earlier epoch."""
        self._tell("forget", self.epoch)

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _take(self, state: dict[str, Any], possible: Sequence[Possible]) -> None:
        epoch, label = state["weight_epoch"], state["weight_version"]
        if epoch != self.epoch + 1:
            raise Violation(f"after epoch {self.epoch} came epoch {epoch}, in one call")
        held = self._checksums()
        for each in possible:
            if held == _fingerprints(each.tensors):
                break
        else:
            raise Violation(f"epoch {epoch}, {label!r}, is none of {len(possible)} contents that could be committed")
        if not re.fullmatch(each.label, label):
            raise Violation(f"epoch {epoch} is called {label!r}, and not {each.label!r}")
        if state["content_digest"] not in (None, _digest(each.tensors)):
            raise Violation(f"the digest of epoch {epoch} is not that of its content")
        self.epoch, self.label, self.tensors = epoch, label, each.tensors
        self.num_commits += 1
        self._announce()

    def _announce(self) -> None:
        file = self._folder / f"epoch-{self.epoch}.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, file)
        self._tell("content", self.epoch, self.label, file)

    def _check_content(self) -> None:
        if self._checksums() != _fingerprints(self.tensors):
            raise Violation(f"the tensors in memory are not those of epoch {self.epoch}")

    def _state(self) -> dict[str, Any]:
        answer = self._calls.get("/weight_version")
        if answer.status_code != 200:
            raise Violation(f"/weight_version: {answer.status_code} {answer.text[:300]}")
        return answer.json()

    def _checksums(self) -> dict[str, str]:
        reply = self._calls.post("/weights_checker", {"action": "checksum"})
        if reply.status_code != 200:
            raise Violation(f"/weights_checker: {reply.status_code} {reply.text[:300]}")
        return reply.json()["checksums"]


def _fingerprints(tensors: Tensors) -> dict[str, str]:
    return {name: fingerprint_hex(fingerprint(tensor)) for name, tensor in tensors.items()}


def _digest(tensors: Tensors) -> str:
    return digest(
        (TensorMeta(name, each.dtype, tuple(each.shape)), fingerprint(each)) for name, each in tensors.items()
    )
