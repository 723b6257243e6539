"""Agents with tools on published tokenizers and templates, before a tiny model whose answers are scripted.

A scripted answer has thoughts, text and calls in its model's format.  Its tokens are cut at random places of the text,
and seldom the ones that the tokenizer makes of the whole text.  Log-probabilities are the model's.  The templates of
gpt-oss and Llama 3.1 in `recorded/chat_templates` are the publishers', as trl 1.0 (Apache-2.0) carries them.
"""

from __future__ import annotations

import functools
import json
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from examples.make_checkpoint.run import hf_config, random_weights
from rollout.sampling.base import SampledTokens, Sampler, ScoredTokens
from rollout.sampling.batch_info import SamplingBatchInfo
from rollout.text.tokenizer import Tokenizer
from tests.conversations import TOOLS, WORDS
from tests.http_harness import Live
from tests.model_zoo import tiny_spec
from tests.published_tokenizers import published

TEMPLATES = Path(__file__).parent / "recorded" / "chat_templates"


@dataclass(frozen=True)
class Family:
    """A tokenizer, its parsers, and how its model writes thoughts, text and calls, and ends a turn."""

    tokenizer: str
    calls: str
    thoughts: str | None
    thought: str
    call: str
    calls_begin: str
    calls_end: str
    end: str
    template: str | None = None
    text: str = "{}"

    def answer(self, rng: random.Random) -> str:
        """Return an answer with its end."""
        said = self.thought.format(words(rng)) if self.thoughts is not None and rng.random() < 0.6 else ""
        calls = [json.dumps({"place": words(rng), "days": rng.randrange(9)}, ensure_ascii=rng.random() < 0.5)]
        if rng.random() < 0.5:
            written = [self.call.replace("ARGUMENTS", arguments) for arguments in calls]
            return said + self.calls_begin + "".join(written) + self.calls_end
        return said + self.text.format(words(rng)) + self.end


FAMILIES = {
    "qwen3": Family(
        "qwen3", "hermes", "qwen3", "<think>\n{}\n</think>\n\n",
        '<tool_call>\n{"name": "get_weather", "arguments": ARGUMENTS}\n</tool_call>', "", "<|im_end|>", "<|im_end|>",
    ),
    "deepseek_r1": Family(
        "deepseek_r1", "deepseek_v3", "deepseek_v3", "<think>\n{}\n</think>\n\n",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>",
    ),
    "deepseek_v3": Family(
        "deepseek_v3", "deepseek_v3", None, "",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>",
    ),
    "llama3_1": Family(
        "llama3_1", "llama3", None, "", '{"name": "get_weather", "parameters": ARGUMENTS}', "", "<|eot_id|>",
        "<|eot_id|>", template="llama3_1.jinja",
    ),
    "gptoss": Family(
        "gptoss", "gpt-oss", "gpt-oss", "<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>ARGUMENTS", "", "<|call|>",
        "<|return|>", template="gptoss.jinja", text="<|channel|>final<|message|>{}",
    ),
}  # fmt: skip


def words(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 8)))


@functools.cache
def _facts(folder: Path, end: str) -> tuple[int, int]:
    """Return the id of a special token, and the number of ids."""
    tokenizer = Tokenizer.load(folder)
    (end_id,) = tokenizer._encode([end], False)[0]
    return end_id, max(tokenizer.backend.get_vocab().values()) + 1


def write_model(folder: Path, family: Family, seed: int, context_length: int) -> Path:
    """Write a tiny MoE model with the whole vocabulary of a family's tokenizer, and the tokenizer's files."""
    source = published(family.tokenizer)
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)
    if family.template is not None:
        shutil.copy(TEMPLATES / family.template, folder / "chat_template.jinja")
    end, size = _facts(source, family.end)
    spec = tiny_spec("moe", seed, vocab_size=size, hidden_size=32, context_length=context_length)
    (folder / "config.json").write_text(json.dumps(hf_config(spec, [end, end])))
    save_file({name: tensor.contiguous() for name, tensor in random_weights(spec)}, folder / "model.safetensors")
    return folder


@dataclass
class ScriptedSampler(Sampler):
    """A sampler that takes the tokens of the script of a row's seed while it lasts, then samples as `within` does.

    `prompts` and `sampled` are what the engine forwarded and got, by seed.
    """

    within: Sampler
    scripts: dict[int, list[int]] = field(default_factory=dict)
    prompts: dict[int, list[int]] = field(default_factory=dict)
    sampled: dict[int, list[int]] = field(default_factory=dict)
    batch_invariant = True

    def sample(self, logits_NV: torch.Tensor, info: SamplingBatchInfo, positions_N: torch.Tensor) -> SampledTokens:
        plain = logits_NV.clone()
        tokens = self.within.sample(logits_NV, info, positions_N)
        for index, (row, position) in enumerate(zip(info.rows, positions_N.tolist())):
            script = self.scripts.get(row.seed, [])
            if position < len(script):
                target = torch.tensor([script[position]])
                temperature = row.params.effective_temperature
                scored = self.within.score(plain[index : index + 1], target, temperature, [], 0)
                tokens.token_ids[index] = target[0]
                tokens.logprobs[index] = scored.logprobs[0]
            self.prompts[row.seed] = list(row.prompt_ids)
            self.sampled.setdefault(row.seed, []).append(int(tokens.token_ids[index]))
        return tokens

    def score(
        self, logits_NV: torch.Tensor, target_ids_N: torch.Tensor, temperature: float, chosen_ids: list[int], top_n: int
    ) -> ScoredTokens:
        return self.within.score(logits_NV, target_ids_N, temperature, chosen_ids, top_n)


class Agent:
    """A client that keeps a conversation as it got it, calls tools, and sometimes goes back or asks again."""

    def __init__(self, live: Live, family: Family, sampler: ScriptedSampler, number: int) -> None:
        self.session = f"s{number}"
        self.rng = random.Random(number)
        self.temperature = self.rng.choice([0.7, 1.0])
        self.seeds: dict[str, int] = {}
        self._live, self._family, self._sampler, self._number = live, family, sampler, number
        self._tools = TOOLS if number % 4 else None
        self._sends_thoughts = number % 3 == 0
        self._messages: list[dict[str, Any]] = []

    def play(self, num_turns: int) -> None:
        for _ in range(num_turns):
            ends = [i for i, message in enumerate(self._messages) if message["role"] == "assistant"]
            if ends and self.rng.random() < 0.3:
                self._messages = self._messages[: self.rng.choice([0, *ends])]  # another answer to the same messages
            self._say()
            self._ask()

    def _say(self) -> None:
        last = self._messages[-1] if self._messages else {"role": "assistant"}
        calls = last.get("tool_calls") or []
        if calls:
            self._messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": words(self.rng)} for call in calls
            ]
        elif last["role"] == "assistant":
            self._messages.append({"role": "user", "content": words(self.rng)})

    def _ask(self) -> None:
        seed = self._number * 1000 + len(self.seeds)
        rid = f"{self.session}-{len(self.seeds)}"
        self.seeds[rid] = seed
        self._sampler.scripts[seed] = self._script()
        body = {
            "rid": rid,
            "messages": self._messages,
            "max_tokens": self.rng.choice([3, 200, 200, 200]),
            "temperature": self.temperature,
            "seed": seed,
            "session_id": self.session,
        }
        if self._tools is not None:
            body["tools"] = self._tools
        reply = self._live.client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        message = reply.json()["choices"][0]["message"]
        names = ("role", "content", "tool_calls", *(("reasoning_content",) if self._sends_thoughts else ()))
        self._messages.append({name: message[name] for name in names if message.get(name) is not None})

    def _script(self) -> list[int]:
        """Return the tokens of an answer, cut at random places that are not within a marker."""
        text, ids = self._family.answer(self.rng), []
        tokenizer = self._live.manager.tokenizer
        for part in text.split(" "):
            cut = self.rng.randint(0, len(part))
            pieces = [part] if "<" in part or ">" in part else [part[:cut], part[cut:]]
            ids += [token for piece in [*pieces, " "] for token in tokenizer._encode([piece], False)[0]]
        return ids[:-1] if text.split(" ")[-1] else ids

    def record(self) -> dict[str, Any]:
        record: dict[str, Any] = self._live.client.get(f"/sessions/{self.session}/record").json()
        return record
