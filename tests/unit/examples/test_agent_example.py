"""The parts of examples/agent that need no server: the task, the record, demonstrations, the loss."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from capture.replay import record_routes
from capture.routed_experts import RoutedExperts, id_dtype
from examples.agent import train
from examples.agent.episodes import Agent, Episode, ids_of
from examples.agent.plots import plot, results_table
from examples.agent.policy import SPEC, demonstrate, load_tokenizer, new_model, padded
from examples.agent.record import Record, RecordError, Turn
from examples.agent.run import load_results, main
from examples.agent.task import Problem, calculate, problems, use_tool
from examples.agent.train import Judgement, Result, Step, policy_objective
from rollout.client import VersionSpan
from rollout.core.errors import LockstepError

PROBLEM = Problem(17, 25, 31)


def test_no_problem_is_both_trained_on_and_held_out() -> None:
    held_out = set(islice(problems(1, held_out=True), 300))
    trained = {problem for seed in range(3) for problem in islice(problems(seed, held_out=False), 3000)}
    assert not held_out & trained and all(problem.is_held_out for problem in held_out)


def test_the_calls_of_a_problem_lead_to_its_answer() -> None:
    for problem in islice(problems(0, held_out=False), 50):
        assert [calculate(call) for call in problem.calls] == [str(problem.a * problem.b), problem.answer]
        assert problem.reward(f" {problem.answer}\n") == 1.0
        assert problem.reward(problem.answer + "0") == problem.reward(None) == 0.0


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("calculator", '{"expression": "__import__(\'os\').getcwd()"}'),
        ("calculator", '{"expression": "9**9"}'),
        ("calculator", '{"expression": "1+2+3"}'),
        ("calculator", '{"expression": "9999999999*2"}'),
        ("calculator", '{"expression": 3}'),
        ("calculator", '["1+2"]'),
        ("calculator", "1+2"),
        ("shell", '{"expression": "1+2"}'),
    ],
)
def test_the_tool_refuses_anything_but_one_operation(name: str, arguments: str) -> None:
    assert use_tool("calculator", '{"expression": "1+2"}') == "3"
    assert use_tool(name, arguments) == "error"


def routes(start: int, rows: int, first: int = 0) -> RoutedExperts:
    ids_TLK = (np.arange(rows)[:, None, None] + first + np.arange(2)) % 8
    return RoutedExperts(ids_TLK.astype(id_dtype(8)), 8, (0,), 1, start)


def turn(prompt_ids: list[int], output_ids: list[int], known: int, version: str = "4") -> Turn:
    """Return a turn whose prompt begins with `known` ids of a record."""
    start = max(0, known - 1)
    spans = [VersionSpan(version, 0, len(output_ids))]
    rows = len(prompt_ids) + len(output_ids) - 1 - start
    return Turn(prompt_ids, output_ids, [-0.5] * len(output_ids), spans, routes(start, rows), start)


def test_turns_that_continue_each_other_make_one_sequence() -> None:
    record = Record()
    record.add(turn([1, 2], [3, 4], known=0))
    record.add(turn([1, 2, 3, 4, 9], [5], known=4, version="5"))
    assert record.ids == [1, 2, 3, 4, 9, 5]
    assert record.is_sampled == [False, False, True, True, False, True]
    assert record.logprobs == [0.0, 0.0, -0.5, -0.5, 0.0, -0.5]
    assert record.versions == [-1, -1, 4, 4, -1, 5]
    assert record.num_turns == 2 and record.num_routed == len(record.routes) == 5
    assert (record.prompt_tokens, record.cached_tokens) == (7, 3)


SECOND = turn([1, 2, 3, 4, 9], [5], known=4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (replace(SECOND, prompt_ids=[1, 2, 7, 4, 9]), "id 7 at position 2, where the record has 3"),
        (replace(SECOND, prompt_ids=[1, 2, 34, 9, 8]), "was tokenised again"),  # two ids became one
        (replace(SECOND, prompt_ids=[1, 2, 3]), "a prompt of 3 ids, the record 4"),
        (replace(SECOND, prompt_ids=[1, 2, 3, 4]), "must add ids"),
        (replace(SECOND, routes=routes(4, 2)), "routes of positions 4 to 6"),
        (replace(SECOND, routes=routes(3, 1)), "others are missing"),
        (replace(SECOND, logprobs=[]), "0 log-probabilities for 1 sampled ids"),
        (replace(SECOND, versions=[]), "versions for 0 of 1"),
    ],
)
def test_a_turn_that_does_not_continue_is_refused(wrong: Turn, message: str) -> None:
    record = Record()
    record.add(turn([1, 2], [3, 4], known=0))
    before = list(record.ids)
    with pytest.raises(RecordError, match=message):
        record.add(wrong)
    assert record.ids == before and record.num_turns == 1
    record.add(SECOND)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agent")
    new_model(folder, 0)
    return folder


def test_demonstrations_are_spelled_as_the_server_and_the_tool_spell(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    shown = demonstrate(tokenizer, PROBLEM, uses_tool=True)
    text = tokenizer.decode(shown.ids, skip_special_tokens=False)
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "%s"}}\n</tool_call><|im_end|>\n'
    assert text == (
        "<|im_start|>user\n17*25+31<|im_end|>\n<|im_start|>assistant\n" + call % "17*25"
        + "<|im_start|>tool\n425<|im_end|>\n<|im_start|>assistant\n" + call % "425+31"
        + "<|im_start|>tool\n456<|im_end|>\n<|im_start|>assistant\n456<|im_end|>"
    )  # fmt: skip
    mine = [token for token, is_sampled in zip(shown.ids, shown.is_sampled) if is_sampled]
    assert tokenizer.decode(mine, skip_special_tokens=True).endswith('425+31"}}\n</tool_call>456')
    direct = demonstrate(tokenizer, PROBLEM, uses_tool=False)
    assert direct.ids[-len(ids_of(tokenizer, "456<|im_end|>")) :] == ids_of(tokenizer, "456<|im_end|>")


def test_a_call_has_spellings_that_a_tokenizer_would_not_return(folder: Path) -> None:
    """Tokenising a sampled text again gives other ids: this is why ids are recorded."""
    tokenizer = load_tokenizer(folder)
    text = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+2"}}\n</tool_call>'
    spelled = [token for letter in text for token in ids_of(tokenizer, letter)]
    assert tokenizer.decode(spelled) == text and ids_of(tokenizer, text) != spelled


def tiny_model(folder: Path) -> Any:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    config._experts_implementation = config._attn_implementation = "eager"
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()


def episodes_of(folder: Path, model: Any, answers: list[str | None]) -> list[Episode]:
    """Return an episode for each answer, of several lengths, with the model's own routes as the recorded ones."""
    tokenizer, found = load_tokenizer(folder), []
    for number, (problem, answer) in enumerate(zip(islice(problems(2, held_out=False), len(answers)), answers)):
        shown = demonstrate(tokenizer, problem, uses_tool=number % 2 == 0)
        with record_routes(model) as recorded, torch.no_grad():
            model(input_ids=torch.tensor([shown.ids]), use_cache=False)
        ids_TLK = recorded.ids().numpy()[: len(shown.ids) - 1].astype(id_dtype(SPEC.experts))
        routed = RoutedExperts(ids_TLK, SPEC.experts, tuple(range(SPEC.layers)), SPEC.layers)
        noise = np.random.default_rng(number).normal(0, 0.4, len(shown.ids))
        logprobs = [-6.0 + float(each) if mine else 0.0 for each, mine in zip(noise, shown.is_sampled)]
        record = Record(list(shown.ids), list(shown.is_sampled), logprobs, [0] * len(shown.ids), 1, _routes=[routed])
        found.append(Episode(problem, record, problem.answer if answer == "right" else answer, 0))
    return found


def reference_loss(model: Any, episodes: list[Episode], signs: list[float]) -> torch.Tensor:
    """Return the loss by its definition, token by token, one episode at a time."""
    terms: list[torch.Tensor] = []
    for episode, sign in zip(episodes, signs):
        ids, record = episode.record.ids, episode.record
        logits_SV = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        for position in range(1, len(ids)):
            if record.is_sampled[position]:
                row_V = logits_SV[position - 1]
                logprob = row_V[ids[position]] - torch.log(torch.exp(row_V).sum())
                ratio = torch.exp(logprob - float(np.float32(record.logprobs[position])))
                clipped = min(max(ratio.item(), 0.8), 1.28) * sign
                terms.append(-(ratio * sign if ratio.item() * sign <= clipped else ratio.detach() * 0 + clipped))
    return torch.stack(terms).mean()


def shifted(sequences: Any) -> Any:
    return padded([(ids, [*mask[1:], False]) for ids, mask in sequences])


# The rewards of a group are 1 and 0 by halves: advantages are exactly 1 and -1.
ANSWERS = ["right", "1", None, "right", "2", "right", "right", None]
SIGNS = [1.0, -1.0, -1.0, 1.0, -1.0, 1.0, 1.0, -1.0]


def loss_and_gradient(loss: torch.Tensor, model: Any) -> tuple[float, torch.Tensor]:
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return loss.item(), torch.cat([gradient.flatten() for gradient in gradients])


@pytest.fixture(scope="module")
def loss_case(folder: Path) -> tuple[Any, list[Episode], float, torch.Tensor]:
    model = tiny_model(folder)
    episodes = episodes_of(folder, model, list(ANSWERS))
    return model, episodes, *loss_and_gradient(reference_loss(model, episodes, SIGNS), model)


def test_the_loss_is_the_definition_in_float64(loss_case: Any) -> None:
    model, episodes, expected, gradient = loss_case
    loss, difference = policy_objective(model, episodes, group_size=4)
    value, found = loss_and_gradient(loss, model)
    assert value == pytest.approx(expected, rel=1e-12) and difference > 0.1
    assert (found - gradient).norm() < 1e-6 * gradient.norm()  # norms of transformers are float32 inside


def others_advantages(episodes: list[Episode]) -> list[Episode]:
    return [replace(episode, answer=other.answer) for episode, other in zip(episodes, [*episodes[1:], episodes[0]])]


def other_routes(episodes: list[Episode]) -> list[Episode]:
    def changed(record: Record) -> Record:
        moved = (record.routes.logical_ids_TLK + 1) % SPEC.experts
        return replace(record, _routes=[replace(record.routes, logical_ids_TLK=moved)])

    return [replace(episode, record=changed(episode.record)) for episode in episodes]


@pytest.mark.mutant
@pytest.mark.parametrize("wrong", [None, others_advantages, other_routes], ids=["mask", "advantages", "routes"])
def test_a_wrong_loss_is_noticed(
    loss_case: Any, wrong: Callable[[list[Episode]], list[Episode]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, episodes, expected, _ = loss_case
    if wrong is None:
        monkeypatch.setattr(train, "padded", shifted)
        monkeypatch.setattr(train, "recorded_logprobs", lambda _: torch.tensor(-6.0))
    loss, _ = policy_objective(model, episodes if wrong is None else wrong(episodes), group_size=4)
    assert not math.isclose(loss.item(), expected, rel_tol=1e-6)


@pytest.mark.parametrize("status", [200, 400])
def test_a_session_that_does_not_end_is_an_error(status: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def reply(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        return httpx.Response(status, text="not now")

    async def answered(*_: Any) -> dict[str, Any]:
        return {"finish_reason": "stop", "message": {"content": PROBLEM.answer}}

    async def played() -> list[Episode]:
        async with Agent("http://engine", load_tokenizer(folder)) as agent:
            await agent._http.aclose()
            agent._http = httpx.AsyncClient(base_url="http://engine", transport=httpx.MockTransport(reply))
            return await agent.play([PROBLEM], 1)

    monkeypatch.setattr(Agent, "_turn", answered)
    if status == 200:
        (episode,) = asyncio.run(played())
        assert episode.reward == 1.0
    else:
        with pytest.raises(LockstepError, match="did not end session episode-0: not now"):
            asyncio.run(played())
    assert asked == ["http://engine/finish_session?session_id=episode-0"]


def test_table_and_plot_of_runs(tmp_path: Path) -> None:
    step = Step(1, 1.0, 0.4, 1.2, 2.2, 900, 0.6, 0.001)
    results = [Result(seed, [Judgement(0, 0.2, 0.9), Judgement(1, 0.6, 1.8)], [step]) for seed in (0, 1)]
    assert results_table(results).row_count == 2
    assert plot(results, tmp_path / "rewards.png").read_bytes().startswith(b"\x89PNG")
    assert load_results(tmp_path) == []


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--seeds"], ["--threads", "-1"]])
def test_wrong_arguments_are_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err.splitlines()[-1]
