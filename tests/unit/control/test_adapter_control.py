"""Adapters that come and go while requests run: a request keeps its version, and refusals change nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from rollout.core.messages.adapters import LoadLoraAdapterReqInput, UnloadLoraAdapterReqInput
from rollout.core.messages.io_struct import AbortReqInput, ContinueGenerationReqInput, PauseGenerationReqInput
from rollout.core.messages.message import ControlReqOutput
from rollout.scheduler.req import Req
from tests.adapters import ATTENTION, logprobs_of, save_adapter
from tests.family_zoo import family_checkpoint
from tests.scheduler_harness import Harness, Result

SEED = 3
PROMPT = [5, 9, 200, 31, 7, 8, 44, 17]
NEAR = 1e-4  # float32 sums in two orders


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", SEED)


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the folders of three contents."""
    return [
        save_adapter(tmp_path_factory.mktemp("a"), "qwen3", SEED, seed, target_modules=ATTENTION, r=2, lora_alpha=4)
        for seed in range(3)
    ]


class Engine(Harness):
    """An engine with slots for two versions, which starts without any."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        defaults = {"enable_lora": True, "max_loras_per_batch": 2, "enable_return_routed_experts": False}
        super().__init__(folder, **defaults | settings)

    @property
    def versions(self) -> list[str]:
        return [f"{each.name}@{each.version}" for each in self.scheduler.runner.state.adapters.labels]

    def load(self, path: Path, name: str = "poet", **fields: Any) -> ControlReqOutput:
        return self.control(LoadLoraAdapterReqInput, lora_name=name, lora_path=str(path), **fields)

    def loaded(self, path: Path, name: str = "poet", **fields: Any) -> int:
        answer = self.load(path, name, **fields)
        assert answer.success, answer.message
        return answer.data["version"]

    def begin(self, count: int = 12, name: str = "poet", **fields: Any) -> str:
        """Begin a request, and compute its first tokens."""
        rid = self.submit(PROMPT, params={"max_new_tokens": count}, lora_name=name, **fields)
        for _ in range(3):
            self.tick()
        return rid

    def answer(self, name: str | None = "poet", count: int = 2) -> Result:
        (result,) = self.generate([PROMPT], {"max_new_tokens": count}, lora_name=name)
        assert result.finished is not None and result.finished.reason.type == "length", result.finished
        return result


def distance(result: Result, content: Path | None) -> float:
    """Return how far the log-probabilities of the sampled tokens are from PEFT's."""
    want = logprobs_of("qwen3", SEED, content, [*PROMPT, *result.token_ids])[len(PROMPT) - 1 :]
    return max(abs(a - b) for a, b in zip(result.logprobs, want, strict=True))


def test_a_request_keeps_its_version_and_later_ones_get_the_next(folder: Path, contents: list[Path]) -> None:
    engine = Engine(folder)
    assert engine.loaded(contents[0]) == 0
    running = paused(engine, engine.begin())
    assert engine.loaded(contents[1]) == 1 and engine.results[running].finished is None
    engine.control(ContinueGenerationReqInput)
    later, pinned = engine.begin(), engine.begin(name="poet@0")
    engine.run()
    engine.check_idle()
    for rid, content in ((running, 0), (later, 1), (pinned, 0)):
        assert distance(engine.results[rid], contents[content]) < NEAR
        assert distance(engine.results[rid], contents[1 - content]) > 10 * NEAR
    assert engine.results[running].token_ids == engine.results[pinned].token_ids


def of_a_prefix_seen_before(folder: Path, contents: list[Path]) -> float:
    """Serve a prompt with one version, then with the next; return how far the second answer is from PEFT."""
    engine = Engine(folder)
    engine.loaded(contents[0])
    engine.answer()
    engine.loaded(contents[1])
    return distance(engine.answer(), contents[1])


def test_kv_of_an_older_version_under_the_same_name_is_never_used(folder: Path, contents: list[Path]) -> None:
    assert of_a_prefix_seen_before(folder, contents) < NEAR


@pytest.mark.mutant
def test_a_cache_that_knows_adapters_by_name_is_noticed(
    folder: Path, contents: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Req, "cache_key", property(lambda self: self.adapter and self.adapter.label.name))
    assert of_a_prefix_seen_before(folder, contents) > 10 * NEAR


def test_a_reload_applies_an_adapter_once(folder: Path, contents: list[Path]) -> None:
    engine = Engine(folder, max_loras_per_batch=1)
    for count in range(3):
        assert engine.loaded(contents[0]) == count
        assert distance(engine.answer(), contents[0]) < NEAR
    assert distance(engine.answer(None), None) < NEAR


# --- a version is held from admission to the end -----------------------------------------------------------------


def finish(engine: Engine, rid: str) -> None:
    engine.run()
    assert engine.results[rid].finished is not None


def abort(engine: Engine, rid: str) -> None:
    engine.channel.inbox.append(AbortReqInput(rids=[rid]))
    engine.tick()
    assert engine.results[rid].finished is not None


def wait_in_queue(engine: Engine) -> str:
    engine.control(PauseGenerationReqInput, mode="in_place")
    return engine.submit(PROMPT, params={"max_new_tokens": 2}, lora_name="poet@0")


def run_retracted(engine: Engine) -> str:
    rid = engine.begin(name="poet@0")
    engine.control(PauseGenerationReqInput, mode="retract")
    assert len(engine.scheduler.queues.waiting) == 1
    return rid


def run_two_samples(engine: Engine) -> str:
    rid = engine.submit(PROMPT, "one", {"max_new_tokens": 9}, lora_name="poet@0", siblings=[("two", 5)])
    engine.results["two"] = Result("two", PROMPT)
    engine.tick()
    abort(engine, rid)
    return paused(engine, "two")


def paused(engine: Engine, rid: str) -> str:
    """Stop the steps, so that the request does not end while an adapter is read."""
    engine.control(PauseGenerationReqInput, mode="in_place")
    return rid


HOLDS: dict[str, Callable[[Engine], str]] = {
    "a running request": lambda engine: paused(engine, engine.begin(name="poet@0", session_id="s")),
    "a request that waits": wait_in_queue,
    "a request that was retracted": run_retracted,
    "the second of two samples": run_two_samples,
}


def of_a_held_version(folder: Path, contents: list[Path], how: str, end: Callable[[Engine, str], None]) -> list[bool]:
    """Load into the slot of an older version, while it is held and after; return which loads were accepted."""
    engine = Engine(folder)
    engine.loaded(contents[0])
    engine.loaded(contents[1])
    rid = HOLDS[how](engine)
    held, unheld = engine.load(contents[2], "clerk"), engine.versions
    if not held.success:
        assert "poet@0 (in use); poet@1 (newest)" in held.message and unheld == ["poet@0", "poet@1"]
        refused = engine.control(UnloadLoraAdapterReqInput, lora_name="poet", retire=False)
        assert refused.status_code == 409 and "in use" in refused.message
    engine.control(ContinueGenerationReqInput)
    end(engine, rid)
    return [held.success, engine.load(contents[2], "clerk").success]


@pytest.mark.parametrize("end", [finish, abort])
@pytest.mark.parametrize("how", HOLDS)
def test_a_version_in_use_is_never_evicted(
    folder: Path, contents: list[Path], how: str, end: Callable[[Engine, str], None]
) -> None:
    assert of_a_held_version(folder, contents, how, end) == [False, True]


@pytest.mark.mutant
@pytest.mark.parametrize("how", ["a request that waits", "a request that was retracted"])
def test_a_table_that_forgets_waiting_requests_is_noticed(
    folder: Path, contents: list[Path], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.scheduler.policy.RequestQueues.all", lambda self: self.holding_kv())
    assert of_a_held_version(folder, contents, how, abort)[0]


# --- refusals ------------------------------------------------------------------------------------------------------


def without(path: Path, part: str) -> None:
    tensors = load_file(path / "adapter_model.safetensors")
    save_file({name: each for name, each in tensors.items() if part not in name}, path / "adapter_model.safetensors")


def with_value(path: Path, value: float) -> None:
    tensors = load_file(path / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = value
    save_file(tensors, path / "adapter_model.safetensors")


def with_setting(path: Path, **changes: Any) -> None:
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | changes))


SPOILS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no folder": (shutil.rmtree, "is missing"),
    "a missing half": (lambda path: without(path, "layers.0.self_attn.q_proj.lora_B"), "has no tensor lora_B"),
    "another rank": (lambda path: with_setting(path, r=3), "are not of rank 3"),
    "alpha 0": (lambda path: with_setting(path, lora_alpha=0), "must be a positive number"),
    "NaN": (lambda path: with_value(path, float("nan")), "values that are not finite"),
    "no PEFT": (lambda path: (path / "adapter_config.json").unlink(), "is missing"),
}


def test_bad_adapters_are_refused_in_one_line_and_change_nothing(
    folder: Path, contents: list[Path], tmp_path: Path
) -> None:
    engine = Engine(folder)
    engine.loaded(contents[0])
    before = engine.answer()
    for index, (what, (spoil, reason)) in enumerate(SPOILS.items()):
        path = shutil.copytree(contents[1], tmp_path / str(index))
        spoil(path)
        refused = engine.load(path)
        assert not refused.success and reason in refused.message and "\n" not in refused.message, (what, refused)
        assert refused.status_code in (400, 404), what
    other = shutil.copytree(contents[1], tmp_path / "other")
    tensors = other / "adapter_model.safetensors"
    tensors.write_bytes(tensors.read_bytes().replace(b"self_attn", b"attention"))
    too_big = save_adapter(tmp_path / "big", "qwen3", SEED, target_modules=["q_proj"], r=17, lora_alpha=4)
    for path, fields, reason in (
        (other, {}, "the adapter belongs to another model"),
        (too_big, {}, "has rank 17; --max-lora-rank is 16"),
        (contents[1], {"load_inplace": False}, "load_inplace makes this its next version"),
        (contents[1], {"name": "poet@3"}, "holds no '@'"),
        (contents[1], {"name": engine.args.name}, "is the name of the model"),
    ):
        refused = engine.load(path, **fields)
        assert refused.status_code == 400 and reason in refused.message, refused
    missing = engine.control(UnloadLoraAdapterReqInput, lora_name="gone")
    assert missing.status_code == 404 and "no adapter 'gone'; this server has poet" in missing.message
    assert engine.versions == ["poet@0"]
    again = engine.answer()
    assert again.logprobs == before.logprobs and again.token_ids == before.token_ids


def test_an_unload_ends_a_name_and_its_versions(folder: Path, contents: list[Path]) -> None:
    engine = Engine(folder)
    engine.loaded(contents[0], pinned=True)
    engine.loaded(contents[1])
    full = engine.load(contents[2], "clerk")
    assert "poet@0 (pinned); poet@1 (newest)" in full.message
    answer = engine.control(UnloadLoraAdapterReqInput, lora_name="poet")
    assert answer.success and answer.data == {"loaded_adapters": {}} and engine.versions == []
    for name in ("poet", "poet@1"):
        (gone,) = engine.generate([PROMPT], {"max_new_tokens": 1}, lora_name=name)
        assert gone.finished is not None and gone.finished.reason.status_code == 404
    assert engine.loaded(contents[2]) == 2
    assert distance(engine.answer(), contents[2]) < NEAR
