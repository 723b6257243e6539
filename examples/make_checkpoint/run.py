"""`lockstep make-checkpoint`: a small random checkpoint of any model family in Hugging Face format.

The same arguments give the same bytes.  The weights are random, but of a size that makes a small model behave like a
large one in tests: experts are chosen decisively, and the next token depends on the whole context.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from examples.make_checkpoint.families import published_form
from examples.make_checkpoint.flags import parser as cli_parser
from examples.make_checkpoint.spec import OUTPUT_LOGIT_STD, OWN_FAMILIES, ROUTER_LOGIT_STD, CheckpointSpec
from examples.make_checkpoint.tokenizer import END_OF_TEXT, TURN_END, save_tokenizer, train_tokenizer
from rollout.core.errors import LockstepError, StartupError
from weight_sync.tensor_meta import DTYPES

__all__ = ["CheckpointSpec", "cli_parser", "hf_config", "main", "make_checkpoint", "random_weights"]

NORM_WEIGHT_STD = 0.1

Progress = Callable[[int, int], None]  # bytes written so far, bytes in all


def make_checkpoint(
    path: str | Path, spec: CheckpointSpec | None = None, *, force: bool = False, progress: Progress | None = None
) -> Path:
    """Write config, generation config, tokenizer and weights into the folder `path`, and return it.

    Raises `BadRequest` for a spec that makes no model, `StartupError` for a target that is not an empty or new folder
    (`force` overwrites the files it writes).
    """
    spec = spec or CheckpointSpec()
    spec.validate()
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not (force and folder.is_dir()):
        raise StartupError(f"{folder} is not an empty folder; choose another, or give --force to overwrite")
    tokenizer = train_tokenizer(spec.vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    for stale in (*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")):
        stale.unlink()
    vocabulary = tokenizer.get_vocab()
    eos_token_ids = [vocabulary[TURN_END], vocabulary[END_OF_TEXT]]
    if spec.family in OWN_FAMILIES:
        config, tensors = hf_config(spec, eos_token_ids), dict(random_weights(spec))
    else:
        config, tensors = published_form(spec)
        config |= {"eos_token_id": eos_token_ids[0], "pad_token_id": eos_token_ids[1], "dtype": spec.dtype}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": eos_token_ids, "pad_token_id": eos_token_ids[1]})
    save_tokenizer(tokenizer, folder, spec.context_length)
    _write_weights(folder, tensors, spec.shards, progress)
    return folder


def hf_config(spec: CheckpointSpec, eos_token_ids: list[int]) -> dict[str, Any]:
    """Return the content of `config.json` of a Qwen3-MoE or Qwen3."""
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM" if spec.is_dense else "Qwen3MoeForCausalLM"],
        "model_type": "qwen3" if spec.is_dense else "qwen3_moe",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": spec.rope_theta,
        "max_position_embeddings": spec.context_length,
        "tie_word_embeddings": spec.tie,
        "attention_bias": False,
        "eos_token_id": eos_token_ids[0],
        "pad_token_id": eos_token_ids[1],
        "dtype": spec.dtype,
    }
    if not spec.is_dense:
        config |= {
            "num_experts": spec.experts,
            "num_experts_per_tok": spec.top_k,
            "moe_intermediate_size": spec.moe_intermediate_size,
            "norm_topk_prob": spec.norm_topk_prob,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(range(spec.dense_first)),
        }
    return config


def random_weights(spec: CheckpointSpec, device: torch.device | str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors of a Qwen3-MoE or Qwen3 on `device`, each expert by itself as in published ones.

    The values come from one generator of the device in a fixed order: same arguments and device, same bytes.
    """
    generator = torch.Generator(device).manual_seed(spec.seed)
    dtype = DTYPES[spec.dtype]

    def matrix(rows: int, columns: int, output_std: float = 1.0) -> torch.Tensor:
        """Return a matrix that maps inputs of unit variance to outputs of standard deviation `output_std`."""
        values = torch.randn(rows, columns, generator=generator, device=device)
        return (values * (output_std / math.sqrt(columns))).to(dtype)

    def norm(size: int) -> torch.Tensor:
        return (1.0 + NORM_WEIGHT_STD * torch.randn(size, generator=generator, device=device)).to(dtype)

    def swiglu(prefix: str, inner: int) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"{prefix}.gate_proj.weight", matrix(inner, hidden)
        yield f"{prefix}.up_proj.weight", matrix(inner, hidden)
        yield f"{prefix}.down_proj.weight", matrix(hidden, inner)

    hidden, q_size, kv_size = spec.hidden_size, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    yield "model.embed_tokens.weight", matrix(spec.vocab_size, hidden, OUTPUT_LOGIT_STD)
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", norm(hidden)
        yield f"{prefix}.self_attn.q_proj.weight", matrix(q_size, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", matrix(kv_size, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", matrix(kv_size, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", matrix(hidden, q_size)
        yield f"{prefix}.self_attn.q_norm.weight", norm(spec.head_dim)
        yield f"{prefix}.self_attn.k_norm.weight", norm(spec.head_dim)
        yield f"{prefix}.post_attention_layernorm.weight", norm(hidden)
        if spec.is_moe_layer(layer):
            yield f"{prefix}.mlp.gate.weight", matrix(spec.experts, hidden, ROUTER_LOGIT_STD)
            for expert in range(spec.experts):
                yield from swiglu(f"{prefix}.mlp.experts.{expert}", spec.moe_intermediate_size)
        else:
            yield from swiglu(f"{prefix}.mlp", spec.intermediate_size)
    yield "model.norm.weight", norm(hidden)
    if not spec.tie:
        yield "lm_head.weight", matrix(spec.vocab_size, hidden, OUTPUT_LOGIT_STD)


def _write_weights(folder: Path, tensors: dict[str, torch.Tensor], shards: int, progress: Progress | None) -> None:
    total = sum(tensor.nbytes for tensor in tensors.values())
    names, done = list(tensors), 0
    shards = min(shards, len(names))
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {
            name: tensors[name] for name in names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        }
        save_file(part, folder / file, metadata={"format": "pt"})
        # It is written for its owner alone; everybody who may read the configuration may read the weights.
        (folder / file).chmod((folder / "config.json").stat().st_mode & 0o777)
        weight_map |= dict.fromkeys(part, file)
        done += sum(tensor.nbytes for tensor in part.values())
        if progress is not None:
            progress(done, total)
    if shards > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


# --- command line ------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Run the command with the words after its name; return its exit status.  A refusal is one line on stderr."""
    namespace = cli_parser().parse_args(argv)
    spec = CheckpointSpec(**{item.name: getattr(namespace, item.name) for item in fields(CheckpointSpec)})
    num_bytes = 0

    def progress(done: int, total: int) -> None:
        nonlocal num_bytes
        num_bytes = total
        end = "\n" if done == total else ""
        print(f"\rwriting weights: {done / 1e6:.1f} of {total / 1e6:.1f} MB", end=end, file=sys.stderr, flush=True)

    try:
        folder = make_checkpoint(namespace.path, spec, force=namespace.force, progress=progress)
    except LockstepError as error:
        print(f"lockstep make-checkpoint: {error}", file=sys.stderr)
        return 1
    millions = num_bytes / DTYPES[spec.dtype].itemsize / 1e6
    print(f"{folder}: {millions:.1f} million parameters, {spec.dtype}, seed {spec.seed}")
    return 0
