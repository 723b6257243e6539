"""An engine under test, and the version that it serves.

Serving has three parts: the answer to a fixed request, its label, and the bits in memory.  All three must be of one
version, or the engine must report that it is poisoned.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from rollout.core.messages.io_struct import ContinueGenerationReqInput, ControlReqOutput, GetStateReqInput
from rollout.core.messages.message import ControlReqInput
from rollout.core.messages.weights import AbortWeightUpdateReqInput
from tests.faults.contents import NEW_TOKENS, PROMPT, Answer, Tensors, Version, Zoo
from tests.faults.harness import RefreshHarness
from tests.scheduler_harness import Result
from weight_sync.staging import StagingMode
from weight_sync.tensor_meta import parts_of

Outcome = Literal["old", "new", "POISONED", "ENDED"]

DEADLINE_S = 20.0  # for any call and any fault; far beyond the engine's own deadlines
WEIGHT_UPDATE_TIMEOUT_S = 2.0


class Wrong(Exception):
    """The engine did what no engine may do."""


class Engine(RefreshHarness):
    """`in_force`: the version that serves, as the matrix has last established it."""

    def __init__(self, zoo: Zoo, staging: StagingMode, scratch: Path) -> None:
        super().__init__(
            zoo.checkpoints[0],
            staging,
            scratch,
            **zoo.settings,
            weight_journal_dir=str(scratch),
            weight_update_timeout=WEIGHT_UPDATE_TIMEOUT_S,
            enable_memory_saver=True,
        )
        self.zoo = zoo
        self.in_force = Version("v0", 0)
        self.updater.groups._timeout_s = DEADLINE_S  # torch may take seconds to look up a host's name

    def next_version(self, offset: int) -> Version:
        """Return a new label for the content that is `offset` places after the one in force."""
        return Version(f"v{self.number()}", (self.in_force.content + offset) % len(self.zoo.contents))

    # --- verbs ----------------------------------------------------------------------------------------------------

    def call(self, verb: type[ControlReqInput], **fields: Any) -> ControlReqOutput:
        """Send a verb and return the engine's answer.  Raises `Wrong` when there is none within the deadline."""
        return self.answer_to(self.post(verb, **fields), verb.__name__)

    def answer_to(self, request_id: str, what: str) -> ControlReqOutput:
        self.turn_until(lambda: request_id in self.answers, f"{what} was answered")
        return self.answers.pop(request_id)

    def turn_until(self, condition: Callable[[], bool], what: str) -> None:
        """Turn the loop.  Raises `Wrong` at the deadline."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            ran = self.tick()
            if time.monotonic() > deadline:
                raise Wrong(f"{DEADLINE_S:g} s went by before {what}")
            if not ran and not condition():
                time.sleep(0.0002)

    def require_closed(self) -> None:
        """Require that no update is open.  Raises `Wrong`."""
        if self.call(GetStateReqInput).data["weight_update"]["open"]:
            raise Wrong("the weight update of a trainer that died is still open after its lease")

    # --- requests -------------------------------------------------------------------------------------------------

    def start_request(self, new_tokens: int) -> Result:
        """Start the fixed request under a new cache key."""
        rid = self.submit(
            PROMPT, params={"max_new_tokens": new_tokens}, extra_key=f"n{self.number()}", logprob_start_len=0
        )
        return self.results[rid]

    def settle(self) -> None:
        """Abort the update that is still open after a fault, and continue generation."""
        update = self.call(GetStateReqInput).data["weight_update"]
        if update["open"]:
            self.call(AbortWeightUpdateReqInput, update_id=update["update_id"])
        for _ in range(2):
            if self.scheduler.serving.is_paused:
                self.call(ContinueGenerationReqInput)
        if self.scheduler.serving.is_paused:
            raise Wrong("generation does not continue")

    def finish(self, result: Result) -> None:
        self.turn_until(lambda: result.finished is not None, "a request ended")
        self.results.pop(result.rid, None)

    # --- what is served -------------------------------------------------------------------------------------------

    def outcome(self, old: Version, new: Version) -> Outcome:
        """Return which of the two versions serves, bit for bit.  Raises `Wrong` if neither does, or a mixture."""
        probe = self.start_request(NEW_TOKENS)
        self.finish(probe)
        state = self.call(GetStateReqInput).data
        poisoned = state["poisoned"]
        if poisoned is not None:
            _require_refusal(probe, poisoned)
            return "POISONED"
        version = self.version_served(state, old, new)
        self.require_answer(probe, version)
        self.require_content(version)
        if state["weight_update"]["open"] or state["weight_update"]["steps_held"] or state["paused"]:
            raise Wrong("something is still open, held or paused")
        return "old" if version == old else "new"

    def version_served(self, state: dict[str, Any], old: Version, new: Version) -> Version:
        """Return the one of two versions that the engine's state names.  Raises `Wrong` for another one."""
        label = state["weight_version"]
        if label not in (old.label, new.label):
            raise Wrong(f"the version in force is called {label}")
        return old if label == old.label else new

    def version_of(self, request: Result, old: Version, new: Version) -> Version:
        """Return the one of two versions that a finished request names."""
        assert request.finished is not None
        return new if {span.version for span in request.finished.weight_versions} == {new.label} else old

    def require_answer(self, probe: Result, version: Version) -> None:
        """Require the answer of a fresh engine of this version, under its label.  Raises `Wrong`."""
        record = probe.finished
        assert record is not None
        if record.reason.type != "length" or record.prompt_logprobs is None:
            raise Wrong(f"a request ended with {record.reason}")
        expected = self.zoo.answers[version.content]
        count = len(probe.token_ids)
        answer = Answer(tuple(probe.token_ids), tuple(probe.logprobs), tuple(record.prompt_logprobs.values))
        wanted = Answer(expected.token_ids[:count], expected.logprobs[:count], expected.prompt_logprobs)
        if answer != wanted:
            raise Wrong(f"log-probabilities under the label {version.label} are not those of its content")
        if {span.version for span in record.weight_versions} != {version.label}:
            raise Wrong(f"spans of {record.weight_versions} while {version.label} is in force")

    def require_content(self, version: Version) -> None:
        self.require_tensors(self.zoo.contents[version.content], version.label)

    def require_tensors(self, expected: Tensors, what: str) -> None:
        """Require these bits in the model's memory.  Raises `Wrong`."""
        odd = [
            name for name, tensor in expected.items() if not _same_bits(parts_of(self.weights, name)[0].content, tensor)
        ]
        if odd:
            raise Wrong(f"{len(odd)} of {len(expected)} tensors in memory are not of {what}: {odd[:3]}")


def _require_refusal(probe: Result, reason: str) -> None:
    assert probe.finished is not None
    end = probe.finished.reason
    if end.status_code != 503 or not reason or reason not in (end.message or "") or probe.token_ids:
        raise Wrong(f"poisoned ({reason!r}), and a request ended with {end}")


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))
