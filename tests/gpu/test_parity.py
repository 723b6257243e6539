"""The whole engine on the device against transformers on the device: prefill, prefill in chunks, decode.

    float32    the greedy token of every position is transformers', log-probabilities agree within 1e-4
    bfloat16   log-probabilities are as near to transformers' in float32 as transformers' own in bfloat16 are

Models of four kinds with random weights, of sizes that the device's kernels take.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.family_zoo import family_checkpoint
from tests.scheduler_harness import Harness, Result

# Of each family: sizes of FlashInfer's and of the Triton kernels' tiles; a dry run takes the zoo's own.
_WIDE = {
    "hidden_size": 256,
    "intermediate_size": 192,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 1024,
}
SIZES: dict[str, dict[str, Any]] = {
    "qwen3": _WIDE,
    "qwen3_moe": _WIDE | {"num_experts": 16, "moe_intermediate_size": 128},
    "deepseek_v3": {
        "hidden_size": 256,
        "intermediate_size": 192,
        "moe_intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 1024,
    },
    "gpt_oss": _WIDE | {"sliding_window": 20, "swiglu_limit": 7.0},  # older versions of transformers know no other
}
LENGTHS, NEW_TOKENS = (1, 5, 17, 40, 150), 24
CHUNK = 16
FP32_TOLERANCE = 1e-4
BF16_FACTOR, BF16_SLACK = 1.5, 2e-3


def prompts(vocab_size: int, lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in lengths]


@torch.no_grad()
def theirs(folder: Path, dtype: torch.dtype, device: torch.device, results: list[Result]) -> list[torch.Tensor]:
    """Return transformers' log-probabilities of each whole sequence in one forward, [S, V] in float32 on the CPU."""
    config = AutoConfig.from_pretrained(folder)
    config._attn_implementation = config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype).to(device).eval()
    found = []
    for result in results:
        ids = torch.tensor([result.prompt_ids + result.token_ids], device=device)
        found.append(model(ids).logits[0].float().log_softmax(-1).cpu())
    return found


def ours(result: Result) -> torch.Tensor:
    """Return the engine's log-probability of every token but the first, of the prompt and of the output."""
    assert result.finished is not None and result.finished.prompt_logprobs is not None
    return torch.tensor([*result.finished.prompt_logprobs.values[1:], *result.logprobs])


def of_tokens(logprobs_SV: torch.Tensor, result: Result) -> torch.Tensor:
    ids = torch.tensor(result.prompt_ids + result.token_ids)
    return logprobs_SV[:-1].gather(1, ids[1:, None])[:, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", list(SIZES))
def test_engine_agrees_with_transformers(
    family: str, dtype: torch.dtype, tmp_path: Path, device: torch.device, on_cuda: bool, facts: dict[str, Any]
) -> None:
    folder = family_checkpoint(tmp_path / "model", family, seed=3, **(SIZES[family] if on_cuda else {}))
    lengths, new_tokens = (LENGTHS, NEW_TOKENS) if on_cuda else (LENGTHS[:4], 8)
    name = str(dtype).removeprefix("torch.")
    results = []
    for chunk in (-1, CHUNK):
        harness = Harness(
            folder,
            device=str(device),
            dtype=name,
            chunked_prefill_size=chunk,
            enable_return_routed_experts=family != "qwen3",
        )
        facts["attention"] = type(harness.scheduler.runner.attention).__name__
        asked = prompts(harness.scheduler.runner.state.model.config.vocab_size, lengths)
        results += harness.generate(asked, {"max_new_tokens": new_tokens}, logprob_start_len=0)
        harness.check_idle()
        del harness
    exact = theirs(folder, torch.float32, device, results)
    mine = torch.cat([ours(result) for result in results])
    want = torch.cat([of_tokens(rows, result) for rows, result in zip(exact, results, strict=True)])
    errors = (mine - want).abs()
    facts |= {"median": errors.median().item(), "largest": errors.max().item(), "tokens": len(errors)}
    if dtype == torch.float32:
        assert errors.max() < FP32_TOLERANCE
        for rows, result in zip(exact, results, strict=True):
            best = rows[len(result.prompt_ids) - 1 : -1].topk(2).values
            chosen = of_tokens(rows, result)[len(result.prompt_ids) - 1 :]
            assert (chosen >= best[:, 0] - FP32_TOLERANCE).all(), "not the greedy token"
        return
    rounded = theirs(folder, dtype, device, results)
    their_errors = torch.cat([of_tokens(rows, result) for rows, result in zip(rounded, results, strict=True)]) - want
    facts |= {"their median": their_errors.abs().median().item(), "their largest": their_errors.abs().max().item()}
    assert errors.median() <= BF16_FACTOR * their_errors.abs().median() + BF16_SLACK


def test_the_comparison_can_fail(tmp_path: Path, device: torch.device) -> None:
    """The engine with one weight scaled by 1.01 is not the model that transformers loads."""
    folder = family_checkpoint(tmp_path / "model", "qwen3", seed=3)
    harness = Harness(folder, device=str(device), enable_return_routed_experts=False)
    harness.scheduler.runner.state.model.model.layers[1].input_layernorm.weight.mul_(1.01)
    (result,) = harness.generate([[1, 2, 3, 4]], {"max_new_tokens": 4}, logprob_start_len=0)
    (rows,) = theirs(folder, torch.float32, device, [result])
    assert (ours(result) - of_tokens(rows, result)).abs().max() > FP32_TOLERANCE
