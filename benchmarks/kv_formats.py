"""Keys and values in FP8 next to bfloat16: memory of a token, and how far log-probabilities move.

    python -m benchmarks.kv_formats                              the demo's model, whose weights are random
    python -m benchmarks.kv_formats --model FOLDER --samples 4   a trained model, after pieces of docs/architecture.md

All engines score the same samples of the engine with KV in bfloat16.  They differ in the numbers that the cache holds
alone.  FP8 is measured at a scale of 1, and at scales that bring the largest key and value of each layer to 448.

Shapes: N samples, S positions, V vocabulary.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.shapes import cached_checkpoint
from examples.make_checkpoint.spec import CheckpointSpec
from rollout.kernels.operators.qk_norm_rope_store import FP8_MAX
from rollout.server.engine import Engine
from rollout.text.tokenizer_files import read_tokenizer

PROMPT_TOKENS, NEW_TOKENS = 32, 64
IDS_AT_ONCE = 4096  # the most that a request may ask for
TEXT = Path(__file__).resolve().parents[1] / "docs" / "architecture.md"


def engine_of(folder: str, kv_cache_dtype: str) -> Engine:
    return Engine(
        model_path=folder,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_total_tokens=8192,
        kv_cache_dtype=kv_cache_dtype,
        max_logprob_entries=1 << 26,
    )


def measure(folder: str, prompts: list[list[int]]) -> dict[str, dict[str, Any]]:
    """Return by format: tokens, bytes of a token, KL in nats, top-1 agreement, mean change of a log-probability."""
    plain = engine_of(folder, "bfloat16")
    pool = plain.scheduler.runner.kv_pool
    for tensor in pool.tensors:
        tensor.zero_()  # slots that no token has count as zero in the largest number
    vocab_size = plain.scheduler.runner.state.model.config.vocab_size
    params = {"temperature": 1.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True, "sampling_seed": 7}
    answers = plain.generate(input_ids=prompts, sampling_params=params)
    ids = [[*prompt, *answer["output_ids"]] for prompt, answer in zip(prompts, answers, strict=True)]
    plain_NSV = scores(plain, ids, vocab_size)
    largest = [(k.abs().max().float(), v.abs().max().float()) for k, v in zip(pool.k, pool.v, strict=True) if k.numel()]
    rows = {"bfloat16": _row(plain, ids, plain_NSV, plain_NSV)}
    plain.close()
    with TemporaryDirectory() as temporary:
        for name, path in (("scale 1", folder), ("scales of layers", _with_scales(folder, Path(temporary), largest))):
            engine = engine_of(path, "fp8_e4m3")
            rows[name] = _row(engine, ids, plain_NSV, scores(engine, ids, vocab_size))
            engine.close()
    return rows


def _with_scales(folder: str, target: Path, largest: list[tuple[torch.Tensor, torch.Tensor]]) -> str:
    """Make a checkpoint of links to `folder` with a file of scales; it must have no index of files.

    A file `model.safetensors` would be the only one that is read.
    """
    for path in Path(folder).resolve().iterdir():
        assert path.name != "model.safetensors.index.json", "give a checkpoint of one file"
        (target / path.name.replace("model.safetensors", "weights.safetensors")).symlink_to(path)
    scales = {
        f"model.layers.{layer}.self_attn.{part}_scale": number / FP8_MAX
        for layer, both in enumerate(largest)
        for part, number in zip("kv", both, strict=True)
    }
    save_file(scales, target / "scales.safetensors")
    return str(target)


def _row(engine: Engine, ids: list[list[int]], plain_NSV: torch.Tensor, other_NSV: torch.Tensor) -> dict[str, Any]:
    targets = torch.tensor(ids)[:, PROMPT_TOKENS:, None]
    return {
        "tokens": targets.numel(),
        "bytes": sum(tensor.nbytes // len(tensor) for tensor in engine.scheduler.runner.kv_pool.tensors),
        "kl": (plain_NSV.exp() * (plain_NSV - other_NSV)).sum(-1).mean().item(),
        "top1": (plain_NSV.argmax(-1) == other_NSV.argmax(-1)).float().mean().item(),
        "logprob": (plain_NSV.gather(-1, targets) - other_NSV.gather(-1, targets)).abs().mean().item(),
    }


def scores(engine: Engine, ids: list[list[int]], vocab_size: int) -> torch.Tensor:
    """Return the log-probabilities [N, S, V] of every token after each prompt, from prefills of each sample."""
    parts = [list(range(vocab_size))[at : at + IDS_AT_ONCE] for at in range(0, vocab_size, IDS_AT_ONCE)]
    return torch.stack([torch.cat([_scores(engine, sequence, part) for part in parts], 1) for sequence in ids])


def _scores(engine: Engine, ids: list[int], token_ids: list[int]) -> torch.Tensor:
    answer = engine.generate(
        input_ids=ids,
        sampling_params={"max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=PROMPT_TOKENS - 1,
        token_ids_logprob=token_ids,
    )
    assert isinstance(answer, dict)
    rows = [row for row in answer["meta_info"]["input_token_ids_logprobs"] if row is not None]
    return torch.tensor([[entry[0] for entry in row] for row in rows][-NEW_TOKENS:])


def _prompts(model: str | None, samples: int) -> tuple[str, list[list[int]]]:
    """Return the folder, and the first tokens of each sample: random ones for the demo's model, else pieces of text."""
    if model is not None:
        ids = read_tokenizer(model).backend.encode(TEXT.read_text(encoding="utf-8")).ids
        return model, [ids[at : at + PROMPT_TOKENS] for at in range(0, samples * PROMPT_TOKENS, PROMPT_TOKENS)]
    folder, rng = str(cached_checkpoint("demo-one-file", CheckpointSpec())), random.Random(0)
    return folder, [[rng.randrange(CheckpointSpec().vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(samples)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--samples", type=int, default=32)
    given = parser.parse_args()
    for name, row in measure(*_prompts(given.model, given.samples)).items():
        print(
            f"{name}: {row['tokens']} tokens, bytes of a token {row['bytes']}, KL {row['kl']:.2g}, "
            f"top-1 agreement {row['top1']:.2%}, mean change of a log-probability {row['logprob']:.2g}"
        )


if __name__ == "__main__":
    main()
