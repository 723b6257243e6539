"""The largest request of each kind that a server takes, and the memory of its processes meanwhile.

`python -m tests.integration.test_request_memory 2048` measures it for a limit of 2048 megabytes.
"""

from __future__ import annotations

import bisect
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import TooLarge
from rollout.core.messages.io_struct import SchedulerReady
from rollout.families.registry import load_model_config
from rollout.http.native.generate import GenerateRequest
from rollout.http.openai.protocol import CompletionRequest
from rollout.tokenizer_manager.budget import AnswerForm
from rollout.tokenizer_manager.request import expand
from rollout.tokenizer_manager.validation import ServingLimits, check_messages
from tests.abuse.usage import forget_peaks, usage_of
from tests.model_zoo import tiny_checkpoint
from tests.server_process import ServerProcess

pytestmark = pytest.mark.full

MB = 1 << 20
LIMIT_MB = 48
KEPT_MB = 16
"""Memory that the allocator keeps in addition, in pieces."""
VOCAB = 8192
CONTEXT = 8192
POOLS = {"wide": 32_768, "deep": 16_384}
PROMPT = [5, 6, 7, 8]
ALL_IDS = {"temperature": 1.5, "ignore_eos": True}
GREEDY = {"temperature": 0.0}
MODELS: dict[str, dict[str, Any]] = {
    "wide": {"kind": "moe", "layers": 1, "experts": 2, "top_k": 1},
    "deep": {"kind": "moe", "layers": 16, "experts": 32, "top_k": 32},
}
"""Models for large masks and many tokens, and for large routes."""


@dataclass(frozen=True)
class Case:
    """A request that grows by the tokens of its samples, or of its prompt (`grows_prompt`).

    `status`: the answer to the largest one that is not refused before it begins.
    """

    name: str
    params: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    path: str = "/generate"
    prompts: int = 1
    most: int = CONTEXT - len(PROMPT)
    grows_prompt: bool = False
    model: str = "wide"
    status: int = 200

    def body(self, size: int) -> dict[str, Any]:
        """Return a body with `size` tokens."""
        prompt, new = ([index % VOCAB for index in range(size)], 1) if self.grows_prompt else (PROMPT, size)
        ids = prompt if self.prompts == 1 else [prompt] * self.prompts
        if self.path == "/generate":
            params = ALL_IDS | self.params | {"max_new_tokens": new}
            return {"input_ids": ids, "sampling_params": params} | self.fields
        return {"prompt": ids, "max_tokens": new} | ALL_IDS | self.params | self.fields


TOP = {"return_logprob": True, "top_logprobs_num": 1000}
MASKS = {"return_sampling_mask": True}
COMPACT = {"logprobs_format": "compact"}
SCORED = {"return_logprob": True, "logprob_start_len": 0}
ROUTES = {"return_routed_experts": True}
COMPACT_ROUTES = {"routed_experts_format": "compact"}
COMPACT_STATES = {"hidden_states_format": "compact"}
STATES = {"return_hidden_states": True, "hidden_state_layers": list(range(17))}
CASES = [
    Case("samples", GREEDY | {"n": 512}, prompts=16),
    Case("prompts", GREEDY, prompts=512, grows_prompt=True),
    Case("prompts in the answer", GREEDY | {"n": 512}, {"return_prompt_token_ids": True}, grows_prompt=True),
    Case("log-probabilities", GREEDY | {"n": 128}, {"return_logprob": True}),
    Case("log-probabilities of prompts", GREEDY | {"n": 64}, SCORED, grows_prompt=True),
    Case("compact log-probabilities", GREEDY | {"n": 128}, {"return_logprob": True, "logprobs_format": "compact"}),
    Case("log-probabilities of completions", GREEDY | {"n": 32, "logprobs": 0}, {}, "/v1/completions"),
    Case("alternatives", {}, TOP),
    Case("alternatives of samples", {"n": 16}, TOP),
    Case("compact alternatives", {"n": 4}, TOP | {"logprobs_format": "compact"}),
    Case("chosen ids", {}, {"return_logprob": True, "token_ids_logprob": list(range(300, 4300))}),
    Case("alternatives of completions", {"logprobs": 900}, {}, "/v1/completions"),
    Case("masks in lists", {"n": 4, "top_k": 4000}, MASKS),
    Case("masks in columns", {"n": 4, "top_k": 4000}, MASKS | {"sampling_mask_format": "csr"}),
    Case("masks with their log-probabilities", {"n": 4, "top_k": 4000}, MASKS | {"sampling_logprobs_mode": "support"}),
    Case("masks of top-p", {"n": 4, "top_p": 0.2}, MASKS, status=413),
    Case("routes", GREEDY | {"n": 16}, ROUTES, grows_prompt=True, model="deep"),
    Case("routes of one", GREEDY, ROUTES, grows_prompt=True, model="deep"),
    Case("compact routes", GREEDY | {"n": 64}, ROUTES | COMPACT_ROUTES, grows_prompt=True, model="deep"),
    Case("hidden states in lists", GREEDY, STATES, grows_prompt=True, model="deep"),
    Case("hidden states of samples", GREEDY | {"n": 8}, STATES, model="deep"),
    Case("compact hidden states", GREEDY, STATES | COMPACT_STATES, grows_prompt=True, model="deep"),
    Case("a stream of alternatives", {"n": 2}, TOP | {"stream": True}),
]  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """The largest request: tokens a sample; bytes by which each process grew at most; seconds."""

    size: int
    main: int
    scheduler: int
    seconds: float

    def __str__(self) -> str:
        grown = f"main {self.main / MB:6.0f} MB, scheduler {self.scheduler / MB:6.0f} MB"
        return f"{self.size:6d} tokens a sample: {grown}, {self.seconds:5.1f} s"


class Refuses:
    """The limits of a server, which decide whether it refuses a size of a case, without a request to it."""

    def __init__(self, folder: Path, limit_mb: int, pool: int) -> None:
        args = ServerArgs(
            model_path=str(folder), max_request_mb=limit_mb, enable_return_routed_experts=True, skip_tokenizer_init=True
        )
        ready = SchedulerReady(
            max_total_num_tokens=pool, max_running_requests=1, context_length=CONTEXT,
            capture_routed_experts=True, num_threads=1, num_parameters=1,
 model_bytes=0, weight_version="",
        )  # fmt: skip
        self._limits = ServingLimits.of(args, load_model_config(folder), ready, None)

    def __call__(self, case: Case, size: int) -> bool:
        body = case.body(size)
        model = GenerateRequest if case.path == "/generate" else CompletionRequest
        request = model.model_validate(body).to_request({})
        try:
            check_messages(expand(request), self._limits, AnswerForm.of(request))
        except TooLarge:
            return True
        return False


class Bench:
    """A server whose memory is measured against what it held when it had served little."""

    def __init__(self, server: ServerProcess, refuses: Refuses, pool: int) -> None:
        self.server = server
        self._refuses = refuses
        self._pids = [server.process.pid, server.scheduler_pid()]
        _touch(server, pool)
        self._before = [usage_of([pid]).rss for pid in self._pids]

    def measure(self, case: Case) -> Measured:
        """Play the largest request of a case that the server takes, and measure its memory and time."""
        size = bisect.bisect_left(range(1, case.most + 1), True, key=lambda tokens: self._refuses(case, tokens))
        assert size, f"{case.name}: not one token is taken"
        self.server.http.post("/flush_cache")
        forget_peaks(self._pids)
        started = time.monotonic()
        with self.server.http.stream("POST", case.path, json=case.body(size), timeout=600) as reply:
            num_bytes = sum(map(len, reply.iter_bytes()))
            assert reply.status_code == case.status, (case.name, reply.status_code, num_bytes)
        seconds = time.monotonic() - started
        peaks = [usage_of([pid]).peak_rss for pid in self._pids]
        main, scheduler = (peak - held for peak, held in zip(peaks, self._before, strict=True))
        return Measured(size, main, scheduler, seconds)


def _touch(server: ServerProcess, pool: int) -> None:
    """Write to all of the KV pool, and to the logits of a whole chunk: memory counts from the first write on."""
    length = 2048
    for index in range(pool // length):
        body = {"input_ids": [index % VOCAB] * length, "sampling_params": {"max_new_tokens": 0}} | SCORED
        assert server.http.post("/generate", json=body | COMPACT, timeout=300).status_code == 200


@contextlib.contextmanager
def serving(model: str, limit_mb: int) -> Iterator[Bench]:
    pool = POOLS[model]
    settings = {"max_request_mb": limit_mb, "max_total_tokens": pool, "enable_return_routed_experts": True}
    with tempfile.TemporaryDirectory() as temp:
        folder = checkpoint(Path(temp) / model, model)
        with ServerProcess(folder, context_length=CONTEXT, skip_tokenizer_init=True, **settings) as server:
            yield Bench(server, Refuses(folder, limit_mb, pool), pool)


def checkpoint(folder: Path, model: str) -> Path:
    return tiny_checkpoint(folder, vocab_size=VOCAB, context_length=CONTEXT, hidden_size=32, **MODELS[model])


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_largest_request_stays_under_its_limit_c3(case: Case) -> None:
    """C3: 162 bytes of a body held 466 MB, and nothing bounded them.  A server each: it keeps memory of requests."""
    with serving(case.model, LIMIT_MB) as bench:
        found = bench.measure(case)
        assert max(found.main, found.scheduler) <= (LIMIT_MB + KEPT_MB) * MB, f"{case.name}: {found}"
        if found.size < case.most:
            refused = bench.server.http.post(case.path, json=case.body(found.size + 1))
            assert refused.status_code == 413 and "--max-" in refused.json()["error"]["message"]


def main() -> None:
    limit_mb, wanted = int(sys.argv[1]), sys.argv[2:] or [case.name for case in CASES]
    for case in CASES:
        if case.name in wanted:
            with serving(case.model, limit_mb) as bench:
                print(f"{case.name:36s} {bench.measure(case)}", flush=True)


if __name__ == "__main__":
    main()
