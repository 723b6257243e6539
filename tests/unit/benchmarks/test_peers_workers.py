"""benchmarks/peers/workers: the protocol's answers, and the tensors that go into a GGUF file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from benchmarks.peers.workers.gguf_tensors import float32_of, read_bfloat16, stacked
from benchmarks.peers.workers.protocol import Prompts, answer

pytestmark = pytest.mark.full


class Echo:
    """A system that repeats the last token of each prompt, `extra` times more than requested."""

    about = "echo"

    def __init__(self, extra: int = 0) -> None:
        self._extra = extra

    def generate(self, prompts: Prompts, max_new_tokens: int) -> tuple[float, Prompts]:
        return 0.5, [prompt[-1:] * (max_new_tokens + self._extra) for prompt in prompts]

    def top_logprobs(self, prompts: Prompts, count: int) -> list[list[tuple[int, float]]]:
        return [[(prompt[-1], 0.0)] * count for prompt in prompts]

    def tune(self, prompts: Prompts, max_new_tokens: int) -> str:
        raise RuntimeError("out of tune")

    def close(self) -> None:
        """Do nothing: this stand-in holds no process."""


def _ask(op: str, system: Echo, **fields: int) -> dict:
    return answer(system, {"op": op, "prompts": [[1, 2], [3, 4]]} | fields)


def test_generate_and_top_logprobs() -> None:
    assert _ask("generate", Echo(), max_new_tokens=2) == {"seconds": 0.5, "tokens": [[2, 2], [4, 4]]}
    assert _ask("top_logprobs", Echo(), count=1) == {"top": [[(2, 0.0)], [(4, 0.0)]]}


@pytest.mark.parametrize("extra", [-1, 1])
def test_another_number_of_tokens_than_asked_is_an_error(extra: int) -> None:
    assert "not as asked" in _ask("generate", Echo(extra), max_new_tokens=2)["error"]


def test_an_exception_and_an_unknown_op_are_errors() -> None:
    assert _ask("tune", Echo(), max_new_tokens=1) == {"error": "RuntimeError: out of tune"}
    assert "nonsense" in _ask("nonsense", Echo())["error"]


def _checkpoint(num_layers: int = 2, num_experts: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (7, 4),
        "model.norm.weight": (4,),
        "lm_head.weight": (7, 4),
    }
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes[f"{prefix}self_attn.{name}.weight"] = (4, 4)
        for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
            shapes[f"{prefix}{name}.weight"] = (4,)
        shapes[f"{prefix}mlp.gate.weight"] = (num_experts, 4)
        for expert in range(num_experts):
            for name, shape in (("gate_proj", (6, 4)), ("up_proj", (6, 4)), ("down_proj", (4, 6))):
                shapes[f"{prefix}mlp.experts.{expert}.{name}.weight"] = shape
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def _read(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return read_bfloat16(tmp_path / "model.safetensors")


def test_every_tensor_is_read_bit_for_bit(tmp_path: Path) -> None:
    tensors = _checkpoint()
    read = _read(tmp_path, tensors)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert np.array_equal(read[name], tensor.view(torch.uint16).numpy()), name
        assert np.array_equal(float32_of(read[name]), tensor.float().numpy()), name


def test_experts_are_stacked_in_order(tmp_path: Path) -> None:
    tensors = _checkpoint()
    named = stacked(_read(tmp_path, tensors), num_layers=2, num_experts=3)
    assert len(named) == 3 + 2 * (9 + 3)
    for expert in range(3):
        expected = tensors[f"model.layers.1.mlp.experts.{expert}.down_proj.weight"].view(torch.uint16).numpy()
        assert np.array_equal(named["blk.1.ffn_down_exps.weight"][expert], expected)


def test_a_tensor_too_many_or_too_few_is_refused(tmp_path: Path) -> None:
    read = _read(tmp_path, _checkpoint())
    with pytest.raises(ValueError, match=r"unexpected tensors: .*model\.layers\.1\."):
        stacked(read, num_layers=1, num_experts=3)
    with pytest.raises(KeyError):
        stacked(read, num_layers=2, num_experts=4)


def test_another_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a is F32"):
        _read(tmp_path, {"a": torch.zeros(2)})
