"""The lines that a server prints once it is ready."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from rollout.core.args.server_args import ServerArgs
from rollout.core.version import VERSION
from rollout.server.start_report import base_url, start_report

ARGS = ServerArgs(model_path="./checkpoint")
CONFIG = SimpleNamespace(architecture="Qwen3MoeForCausalLM")
READY = SimpleNamespace(
    num_parameters=30_500_000_000,
    max_total_num_tokens=65536,
    context_length=4096,
    num_threads=8,
    capture_routed_experts=True,
    weight_version="v1",
)
STATE = SimpleNamespace(
    dtype="bfloat16",
    model_bytes=61 << 30,
    kv_bytes=3 << 20,
    device="cpu",
    cpu_isa="amx",
    plain_torch_reason="",
    plain_linears={},
    prompt_attention="",
    batch_invariant=True,
    batch_invariance_note="",
)


def facts(args: ServerArgs = ARGS, **state: object) -> dict[str, str]:
    lines = start_report(args, CONFIG, READY, SimpleNamespace(**vars(STATE) | state))  # type: ignore[arg-type]
    return {line[:16].strip(): line[17:] for line in lines}


def test_ten_lines_name_what_is_served_on_what_and_where_n18() -> None:
    """N18: the log stated "loading" and "ready", and nothing else."""
    found = facts()
    assert len(found) == 10
    assert found["model"] == "checkpoint, Qwen3MoeForCausalLM, version 'v1'"
    assert found["parameters"] == "30.5 B in bfloat16, 61.0 GiB"
    assert found["KV cache"] == "65536 tokens, 3.0 MiB; context 4096"
    assert found["device"] == "cpu, 1 rank, 8 threads each"
    assert (found["operators"], found["batch invariant"], found["routes"]) == ("compiled for amx", "yes", "recorded")
    assert found["versions"].startswith(f"lockstep {VERSION}, torch 2.")
    assert found["server"] == "http://127.0.0.1:30000"
    assert found["dashboard"] == "http://127.0.0.1:30000/dashboard, metrics at http://127.0.0.1:30000/metrics"


def test_what_a_server_lacks_is_stated_with_its_reason() -> None:
    found = facts(replace(ARGS, enable_metrics=False, tp_size=2), batch_invariant=False, batch_invariance_note="x")
    assert found["batch invariant"] == "no: x"
    assert found["dashboard"] == "off (--enable-metrics)" and "2 ranks" in found["device"]
    assert found["parameters"].endswith("61.0 GiB a rank") and "3.0 MiB a rank" in found["KV cache"]
    assert facts(replace(ARGS, dp_size=2))["parameters"].endswith("30.5 GiB a rank")  # the state has the sum of both


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({}, "compiled for amx"),
        ({"device": "cuda", "cpu_isa": ""}, "Triton and torch"),
        ({"cpu_isa": "", "prompt_attention": "FlashAttention 3"}, "Triton and torch; prompts by FlashAttention 3"),
        ({"cpu_isa": "", "plain_torch_reason": "no compiler"}, "plain torch: no compiler"),
        ({"plain_torch_reason": "no operators for float64"}, "plain torch: no operators for float64"),
        ({"device": "cuda", "cpu_isa": "", "plain_torch_reason": "no Triton"}, "plain torch: no Triton"),
        ({"plain_linears": {"a": "x", "b": "y"}}, "compiled for amx; in bfloat16: a (x), b (y)"),
    ],
)
def test_the_operators_named_are_those_that_run(state: dict[str, str], words: str) -> None:
    """Compiled ones may be loaded and yet not fit the type of the weights."""
    assert facts(**state)["operators"] == words


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:30000"),
        ("::", "http://[::1]:30000"),
        ("::1", "http://[::1]:30000"),
        ("10.0.0.7", "http://10.0.0.7:30000"),
    ],
)
def test_the_address_can_be_opened_on_the_machine_itself(host: str, url: str) -> None:
    assert base_url(replace(ARGS, host=host)) == url
