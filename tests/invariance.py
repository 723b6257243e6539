"""Serves the same requests in many ways and compares the results bit for bit.

Everything goes through a real scheduler with the compiled operators.  Shapes: n output tokens, V vocabulary, L MoE
layers, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollout.core.messages.io_struct import GetStateReqInput
from rollout.families.registry import load_model_config
from rollout.kernels.ops import Ops
from tests.alternatives import chosen_rows
from tests.scheduler_harness import Harness, Result

# Room for everything: nothing is retracted, evicted or split unless a test asks for it.
ROOMY = {"max_total_tokens": 16384, "chunked_prefill_size": -1}


@dataclass(frozen=True)
class Ask:
    """One request: its prompt, its sampling parameters, and the name of its adapter."""

    prompt: tuple[int, ...]
    params: dict[str, Any] = field(default_factory=dict)
    adapter: str | None = None

    @property
    def length(self) -> int:
        return len(self.prompt) + self.params["max_new_tokens"]


@dataclass(frozen=True, eq=False)
class Facts:
    """The answer of an engine to one request."""

    token_ids: list[int]
    logprobs: np.ndarray  # [n] of the sampled tokens
    vocabulary: np.ndarray  # [n, V] of every token at every output position
    routes: np.ndarray  # [rows, L, K]
    retractions: int = 0
    cached_tokens: int = 0


def facts_of(result: Result, has_routes: bool = True) -> Facts:
    assert result.finished is not None
    return Facts(
        result.token_ids,
        np.array(result.logprobs),
        np.array(result.chosen),
        result.routes if has_routes else np.empty((0, 0, 0)),
        result.finished.num_retractions,
        result.finished.cached_tokens,
    )


def differences(got: Facts, want: Facts) -> list[str]:
    """Return the fields whose bits differ."""
    found = [] if got.token_ids == want.token_ids else ["token ids"]
    for name in ("logprobs", "vocabulary", "routes"):
        ours, theirs = getattr(got, name), getattr(want, name)
        if ours.shape != theirs.shape or ours.tobytes() != theirs.tobytes():
            found.append(name)
    return found


class Server:
    """One engine on the compiled operators; `settings` are fields of `ServerArgs`.

    `dtype` may also name the dtype of keys and values, or else the format of experts and projections: "bfloat16, KV in
    fp8_e4m3", "bfloat16, held in fp8".
    """

    def __init__(self, folder: Path, dtype: str, **settings: Any) -> None:
        is_moe = load_model_config(folder).is_moe
        dtype, _, stored = dtype.partition(", KV in ")
        dtype, _, held = dtype.partition(", held in ")
        settings |= {"kv_cache_dtype": stored or "auto", "cpu_linear_format": held or "plain"}
        settings |= {"cpu_weight_format": held or "plain"} if is_moe else {}  # dense models have no experts
        self.harness = Harness(folder, dtype=dtype, **{"enable_return_routed_experts": is_moe} | ROOMY | settings)
        self.has_routes = is_moe
        state = self.harness.control(GetStateReqInput).data
        assert state["batch_invariant"], state["batch_invariance_note"]
        formats = self.harness.scheduler.runner.state.model.weights.held_formats()
        assert {form.flag.split()[-1] for form in formats.values()} == ({held} if held else set())
        self.vocab_size = self.harness.scheduler.runner.state.model.config.vocab_size

    def hit(self, num_tokens: int) -> int:
        """Return the length of the longest prefix of `num_tokens` computed tokens that the cache can give."""
        states = self.harness.scheduler.cache.states
        return num_tokens if states is None else states.shareable(num_tokens)

    def replace_ops(self, wrong: Callable[[Ops], Ops]) -> None:
        """Make every layer compute with `wrong` of the operators that it computes with now, in Python throughout."""
        runner = self.harness.scheduler.runner
        runner.recorded = None
        for _, layer in runner.state.model.named_layers():
            ops = getattr(layer, "ops", None)
            if isinstance(ops, Ops):
                layer.ops = wrong(ops)

    def submit(self, ask: Ask, every_token: bool = True, **fields: Any) -> str:
        chosen = list(range(self.vocab_size)) if every_token else None
        fields |= {"token_ids_logprob": chosen, "lora_name": ask.adapter}
        return self.harness.submit(list(ask.prompt), params=dict(ask.params), **fields)

    def facts(self, rids: Sequence[str]) -> list[Facts]:
        return [facts_of(self.harness.results[rid], self.has_routes) for rid in rids]

    def together(self, asks: Sequence[Ask], gaps: Sequence[int] = (), every_token: bool = True) -> list[Facts]:
        """Run all in one engine; after the i-th arrival `gaps[i]` steps run before the next."""
        rids = []
        for i, ask in enumerate(asks):
            rids.append(self.submit(ask, every_token))
            for _ in range(gaps[i] if i < len(gaps) else 0):
                self.harness.tick()
        self.harness.run()
        self.harness.check_idle()
        return self.facts(rids)

    def alone(self, asks: Sequence[Ask], every_token: bool = True) -> list[Facts]:
        """Run the requests one after the other.

        Start the engine without a prefix cache, or a request finds the KV of another.
        """
        return [self.together([ask], every_token=every_token)[0] for ask in asks]

    def rescored(self, asks: Sequence[Ask], facts: Sequence[Facts], every_token: bool = True) -> list[Facts]:
        """Score the outputs of `facts` as the ends of prompts, all in one engine, without sampling."""
        rids = []
        for ask, known in zip(asks, facts, strict=True):
            temperature = ask.params.get("temperature", 0.0)
            assert temperature in (0.0, 1.0), "scores of prompts are of the logits over the temperature"
            params = {"temperature": temperature, "max_new_tokens": 0}
            whole = Ask((*ask.prompt, *known.token_ids), params, ask.adapter)
            rids.append(self.submit(whole, every_token, logprob_start_len=len(ask.prompt) - 1))
        self.harness.run()
        self.harness.check_idle()
        return [self._scores(rid, known) for rid, known in zip(rids, facts, strict=True)]

    def _scores(self, rid: str, known: Facts) -> Facts:
        result = self.harness.results[rid]
        assert result.finished is not None and result.finished.prompt_logprobs is not None
        scores = result.finished.prompt_logprobs
        chosen = chosen_rows(scores.alternatives, len(scores.values) - 1)
        routes = result.routes if self.has_routes else known.routes
        return Facts(known.token_ids, np.array(scores.values[1:]), np.array(chosen), routes)


def assert_same(got: Sequence[Facts], want: Sequence[Facts]) -> None:
    for i, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        assert not differences(ours, theirs), f"request {i}"


def any_differs(got: Sequence[Facts], want: Sequence[Facts]) -> bool:
    return any(differences(ours, theirs) for ours, theirs in zip(got, want, strict=True))


@contextmanager
def compute_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
