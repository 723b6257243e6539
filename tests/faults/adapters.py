"""An adapter as the target of the matrix: versions of one adapter are refreshed, and the model must stay as it is.

An adapter's tensors lie apart from the model in every staging mode, so no mode can tear it.  Faults that only the
writing of a model has are left out: `LEFT_OUT`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from examples.make_checkpoint.run import CheckpointSpec, make_checkpoint, random_weights
from rollout.core.messages.io_struct import ControlReqOutput
from rollout.core.messages.req_output import AdapterLabel
from rollout.core.messages.weights import (
    BeginWeightUpdateReqInput,
    ManifestEntry,
    UpdateWeightsFromDiskReqInput,
)
from tests.adapter_updates import random_content
from tests.announcements import manifest_of
from tests.faults.cells import FAULTS, Cell
from tests.faults.contents import DTYPE, MATRIX_SHAPE, NEW_TOKENS, NUM_CONTENTS, PROMPT, Answer, Version, Zoo
from tests.faults.engines import Engine, Outcome, Wrong
from tests.faults.trainers import Trainer
from tests.faults.transports import SENDS, Call, Damage, Named, Verb, damaged_bytes, remove_files
from tests.scheduler_harness import Harness, Result
from weight_sync.staging import StagingMode

NAME = "poet"
TRANSPORTS = tuple(name for name in SENDS if name != "delta")  # deltas are of the model
LEFT_OUT = frozenset(
    {
        *("derived tensors raise", "disk full"),  # nothing of the model is written
        "file vanishes while it is read",  # one file, which one bucket brings
    }
)


class AdapterZoo(Zoo):
    """Contents of an adapter for one model; `answers[i]` is the answer with content i of a fresh engine."""

    def __init__(self, folder: Path) -> None:
        spec = CheckpointSpec(seed=0, dtype=DTYPE, **MATRIX_SHAPE)  # type: ignore[arg-type]
        self.base = dict(random_weights(spec))
        self.checkpoints = [make_checkpoint(folder / "base", spec)]
        self.adapters = [random_content(folder / f"adapter{seed}", self.base, seed) for seed in range(NUM_CONTENTS)]
        self.contents = [dict(content.named) for content in self.adapters]
        self.digests = [content.digest for content in self.adapters]
        self.answers = [self._answer(number) for number in range(NUM_CONTENTS)]
        assert len({answer.logprobs for answer in self.answers}) == NUM_CONTENTS

    @property
    def settings(self) -> dict[str, Any]:
        paths = f"{NAME}={self.adapters[0].folder}"
        return super().settings | {"enable_lora": True, "lora_paths": paths, "max_loras_per_batch": 3}

    def _answer(self, number: int) -> Answer:
        settings = self.settings | {"lora_paths": f"{NAME}={self.adapters[number].folder}"}
        (result,) = Harness(self.checkpoints[0], **settings).generate(
            [PROMPT], {"max_new_tokens": NEW_TOKENS}, lora_name=NAME
        )
        return Answer(tuple(result.token_ids), tuple(result.logprobs), ())


class AdapterEngine(Engine):
    """`claimed`: the adapter that each request was answered with."""

    zoo: AdapterZoo

    def __init__(self, zoo: AdapterZoo, staging: StagingMode, scratch: Path) -> None:
        self.claimed: dict[str, AdapterLabel | None] = {}
        super().__init__(zoo, staging, scratch)
        self.staging = "apart"

    def start_request(self, new_tokens: int) -> Result:
        """Start the fixed request under the adapter's name, and no key of its own: cached KV must not outlive it."""
        return self.results[self.submit(PROMPT, params={"max_new_tokens": new_tokens}, lora_name=NAME)]

    def version_served(self, state: dict[str, Any], old: Version, new: Version) -> Version:
        if state["weight_version"] != "v0":
            raise Wrong(f"the model is called {state['weight_version']} after an update of its adapter")
        return self._version_of(self.scheduler.runner.state.adapters.find(NAME).label, old, new)

    def version_of(self, request: Result, old: Version, new: Version) -> Version:
        return self._version_of(self.claimed[request.rid], old, new)

    def _version_of(self, label: AdapterLabel | None, old: Version, new: Version) -> Version:
        for version in (old, new):
            if label is not None and label.content_digest == self.zoo.digests[version.content]:
                return version
        raise Wrong(f"the adapter in force is {label}")

    def require_answer(self, probe: Result, version: Version) -> None:
        record = probe.finished
        assert record is not None
        if record.reason.type != "length":
            raise Wrong(f"a request ended with {record.reason}")
        expected, count = self.zoo.answers[version.content], len(probe.token_ids)
        if (tuple(probe.token_ids), tuple(probe.logprobs)) != (expected.token_ids[:count], expected.logprobs[:count]):
            raise Wrong(f"log-probabilities with content {version.content} are not those of a fresh engine")
        self.version_of(probe, version, version)

    def require_content(self, version: Version) -> None:
        self.require_tensors(self.zoo.base, "the model")

    def _append(self, output: Any) -> None:
        super()._append(output)
        self.claimed[output.rid] = output.adapter


class AdapterTrainer(Trainer):
    """Refreshes the adapter; calls carry no label, which is the model's."""

    engine: AdapterEngine

    def refresh(self, target: Version) -> None:
        self.is_dead, self.request = False, None
        refused = [answer.message for answer in self._transaction(target, None) if not answer.success]
        if refused:
            raise Wrong(f"a good refresh is refused: {refused[0]}")

    def _begin(self, target: Version, named: Named) -> ControlReqOutput:
        return self.engine.call(
            BeginWeightUpdateReqInput,
            update_id=self._update_id,
            target=self.engine.zoo.adapters[target.content].target(NAME),
            manifest=[ManifestEntry(**entry) for entry in manifest_of(named)],
        )

    def send(
        self, named: Named, label: str, damage: Damage | None = None, update_id: str | None = None
    ) -> list[ControlReqOutput]:
        call = Call(self.engine.number(), named, {}, damage)
        sent = self._folder(call) if self.transport == "disk" else SENDS[self.transport](self.engine, call)
        if sent is None:
            return []
        verb, fields = sent
        return [self.engine.call(verb, update_id=update_id, **fields)]

    def _folder(self, call: Call) -> Verb | None:
        """Write a folder of PEFT.  A sender that is killed leaves its file half-written, and does not call."""
        folder = self.engine.scratch / f"call{call.number}"
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps(self.engine.zoo.adapters[0].config))
        file = folder / "adapter_model.safetensors"
        save_file(dict(call.named), file)
        if call.damage in ("flipped", "truncated", "killed"):
            how: Damage = "flipped" if call.damage == "flipped" else "truncated"
            file.write_bytes(damaged_bytes(file.read_bytes(), how))
        if call.damage == "vanished":
            remove_files(folder)
        return None if call.damage == "killed" else (UpdateWeightsFromDiskReqInput, {"model_path": str(folder)})


class AdapterCell(Cell):
    @property
    def allowed(self) -> frozenset[Outcome]:
        return super().allowed - {"POISONED"}


def cells(staging: StagingMode, transport: str) -> Iterator[AdapterCell]:
    """Yield the cells that can occur."""
    for fault in FAULTS:
        if fault.title in LEFT_OUT or transport not in fault.transports or staging not in fault.stagings:
            continue
        for point in fault.points:
            # A slot that holds no version can serve none, and the model has no part in that.
            yield AdapterCell(
                replace(fault, verdict="ENDS") if fault.verdict == "TORN" else fault, point, transport, staging
            )
