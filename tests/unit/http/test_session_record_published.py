"""Random conversations with tools on published templates: a session's record is what the engine forwarded and scored.

The full tier plays 200 of them, fifty on each family; the gate a few on the one tokenizer that is always there.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rollout.engine import build
from rollout.sampling.native_sampler import select_sampler
from tests.engine_thread import EngineThread
from tests.http_harness import Live, live_server
from tests.published_agents import FAMILIES, Agent, ScriptedSampler, write_model
from tests.tiers import in_the_gate

CONTEXT = 4096
GATE = "deepseek_r1"
COUNTS = {GATE: 10, "deepseek_v3": 40, "qwen3": 50, "llama3_1": 50, "gptoss": 50}


@contextmanager
def served(root: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Live, ScriptedSampler, Path]]:
    """Serve a family's model; also give its sampler, and another checkpoint of the model."""
    family = FAMILIES[name]
    folders = [write_model(root / str(seed), family, seed, CONTEXT) for seed in (1, 2)]
    made: list[ScriptedSampler] = []

    def scripted(*args: Any) -> ScriptedSampler:
        made.append(ScriptedSampler(select_sampler(*args)))
        return made[0]

    monkeypatch.setattr(build, "select_sampler", scripted)
    with live_server(
        folders[0],
        engine=EngineThread,
        max_total_tokens=20_000,
        dtype="float32",
        enable_return_routed_experts=True,
        tool_call_parser=family.calls,
        reasoning_parser=family.thoughts,
    ) as live:
        live.client.timeout = 120.0
        yield live, made[0], folders[1]


def load(live: Live, folder: Path | str, version: str) -> None:
    body = {"model_path": str(folder), "weight_version": version}
    assert live.client.post("/update_weights_from_disk", json=body).json()["success"]


def differences(agent: Agent, sampler: ScriptedSampler, record: dict[str, Any]) -> list[str]:
    """Return the turns whose tokens in the record are not the ones that the engine forwarded and sampled."""
    found = []
    turns = {turn["id"]: turn for turn in record["turns"]}
    assert set(turns) == set(agent.seeds)
    for sequence in record["sequences"]:
        for rid in sequence["turns"]:
            turn, seed = turns[rid], agent.seeds[rid]
            ids, start, end = sequence["token_ids"], turn["output_start"], turn["end"]
            own = sequence["sampled"][turn["start"] : end]
            is_same = ids[:start] == sampler.prompts[seed] and ids[start:end] == sampler.sampled[seed][: end - start]
            if not is_same or own != [place >= start for place in range(turn["start"], end)]:
                found.append(rid)
    return found


def scored_otherwise(live: Live, agent: Agent, sequence: dict[str, Any], version: str) -> list[int]:
    """Return the places of a version's tokens that have other log-probabilities when the sequence is scored anew."""
    spans = [(span["start"], span["end"]) for span in sequence["weight_versions"] if span["version"] == version]
    if not spans:
        return []
    meta = live.generate(
        input_ids=sequence["token_ids"],
        sampling_params={"max_new_tokens": 1, "temperature": agent.temperature},
        return_logprob=True,
        logprob_start_len=0,
        extra_key="anew",
    )["meta_info"]
    scored = [entry[0] for entry in meta["input_token_logprobs"]]
    return [
        place for start, end in spans for place in range(start, end) if sequence["logprobs"][place] != scored[place]
    ]


@pytest.mark.full(but=GATE)
@pytest.mark.parametrize("name", COUNTS)
def test_records_of_random_conversations(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 2 if in_the_gate() else COUNTS[name]
    with served(tmp_path, name, monkeypatch) as (live, sampler, second):
        agents = [Agent(live, FAMILIES[name], sampler, number) for number in range(1, count + 1)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda agent: agent.play(3), agents))
            load(live, second, "v2")
            list(pool.map(lambda agent: agent.play(2), agents))
            records = [agent.record() for agent in agents]
            for agent, record in zip(agents, records):
                assert not differences(agent, sampler, record)
            sequences = [(agent, each) for agent, record in zip(agents, records) for each in record["sequences"]]
            assert not any(each["routed_experts_missing"] for _, each in sequences)
            for version in ("v2", "default"):
                if version == "default":
                    load(live, live.manager.server_args.model_path, version)
                wrong = pool.map(lambda pair: scored_otherwise(live, *pair, version), sequences)  # noqa: B023
                assert not any(wrong)
        turns = [turn for record in records for turn in record["turns"]]
        kinds = [bool(turn["parent"]) for turn in turns]
        branches = sum(len(record["sequences"]) - 1 for record in records)
        print(f"{name}: {len(turns)} turns, {sum(kinds)} go on, {branches} branches", flush=True)
        assert any(kinds) and branches


@pytest.mark.mutant
@pytest.mark.parametrize("name", [GATE])
def test_a_record_that_is_tokenized_again_is_noticed(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(tmp_path, name, monkeypatch) as (live, sampler, _):
        agent = Agent(live, FAMILIES[name], sampler, 1)
        agent.play(3)
        record = agent.record()
        assert not differences(agent, sampler, record)
        wrong = 0
        for sequence in record["sequences"]:
            text = live.manager.tokenizer.decode(sequence["token_ids"], skip_special_tokens=False)
            (again,) = live.manager.tokenizer._encode([text], False)
            wrong += again != sequence["token_ids"]
            sequence["token_ids"] = again
        assert wrong and differences(agent, sampler, record)
