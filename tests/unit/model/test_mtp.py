"""The layer that predicts several tokens at once against transformers' model of it, for every family that has one.

The model runs in steps of its own. The layer has a KV pool of its own, under the same slots.

Shapes: T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.attention.registry import create_attention_backend
from rollout.core.errors import StartupError
from rollout.kernels.ops import plain_ops
from rollout.layers.context import ForwardContext
from rollout.memory.kv_pool import KVPool
from rollout.model.decoder import DecoderForCausalLM
from rollout.model.load import load_mtp
from rollout.model.mtp import MtpHead
from tests.family_zoo import family_config
from tests.forward_harness import ForwardHarness
from tests.fp8_reference import fp8_checkpoint, set_config, stored_tensors, values_of
from tests.kernels import native_ops
from tests.model_zoo import load_tiny
from tests.mtp_zoo import MTP_FAMILIES, mtp_checkpoint, mtp_models
from weight_sync.checker import live_fingerprints

LENGTH = 21
IDS = torch.randint(0, 320, (LENGTH + 2,), generator=torch.Generator().manual_seed(5)).tolist()
SEED = 3


class Predicted(NamedTuple):
    """Rows of all tokens at depth 1, then of the one token at depth 2 that follows the last of them."""

    hidden_TD: torch.Tensor
    logits_TV: torch.Tensor


OFTEN = ("deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5_moe")
CASES = [pytest.param(name, marks=[] if name in OFTEN else [pytest.mark.full]) for name in MTP_FAMILIES]


@pytest.fixture(scope="module", params=CASES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_checkpoint(tmp_path_factory.mktemp("mtp") / "model", name, SEED)


@torch.no_grad()
def theirs(name: str, dtype: torch.dtype) -> Predicted:
    """Compute the whole sequence at once, and once more with the layer's own last hidden state behind it."""
    model, head = (part.to(dtype) for part in mtp_models(name, SEED))
    states = model.get_decoder()(torch.tensor([IDS[:LENGTH]])).last_hidden_state
    hidden = _layer(head, states, IDS[1 : LENGTH + 1])
    deeper = _layer(head, torch.cat((states, hidden[:, -1:]), 1), IDS[1:])
    both = torch.cat((hidden, deeper[:, -1:]), 1)
    return Predicted(both[0], head._project_to_logits(both)[0])


def _layer(head: object, states: torch.Tensor, ids: list[int]) -> torch.Tensor:
    positions = torch.arange(len(ids))[None]
    found: torch.Tensor = head.forward_layer(0, states, positions, None, input_ids=torch.tensor([ids]))  # type: ignore
    return found


@torch.inference_mode()
def ours(model: DecoderForCausalLM, head: MtpHead, backend: str, shift: int = 1) -> Predicted:
    """Run a prompt in two chunks, then token by token, with a row of the layer for each token of a step."""
    harness = ForwardHarness(model, backend=backend)
    pool = KVPool(harness.req_to_token.numel(), head.kv_layers, model.dtype)
    for tensor in pool.tensors:
        tensor.fill_(float("nan"))
    attention = create_attention_backend(backend, pool)
    rows = []
    for begin, end in [(0, 4), (4, 11), *((at, at + 1) for at in range(11, LENGTH))]:
        tokens = IDS[begin:end]
        batch = harness.batch({3: tokens}, {}) if len(tokens) > 1 else harness.batch({}, {3: tokens[0]})
        harness.attention.plan(batch)
        hidden_TD = model(batch, harness.context(batch, []))
        batch = replace(batch, input_ids=torch.tensor(IDS[begin + shift : end + shift]), states=None)
        attention.plan(batch)
        rows.append(head(batch, ForwardContext(batch, attention), hidden_TD))
    batch = replace(harness.batch({}, {3: IDS[LENGTH + 1]}), states=None)
    attention.plan(batch)
    rows.append(head(batch, ForwardContext(batch, attention), rows[-1][-1:]))
    hidden_TD = torch.cat(rows)
    return Predicted(hidden_TD, head.compute_logits(hidden_TD))


def difference(got: Predicted, want: Predicted) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(got, want, strict=True))


def loaded(folder: Path, dtype: torch.dtype, make_ops: Callable = plain_ops) -> tuple[DecoderForCausalLM, MtpHead]:
    ops = make_ops()
    model = load_tiny(folder, dtype, ops=ops)
    return model, load_mtp(folder, model, "cpu", ops)


def test_hidden_states_and_logits_are_those_of_transformers(name: str, folder: Path) -> None:
    """transformers computes angles and the delta rule in float32, so that float64 agrees to their precision."""
    assert difference(ours(*loaded(folder, torch.float64), "torch_native"), theirs(name, torch.float64)) < 1e-4
    compiled = ours(*loaded(folder, torch.float32, native_ops), "native_cpu")
    assert difference(compiled, theirs(name, torch.float32)) < 1e-4


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_next"], indirect=True)
def test_a_wrong_form_of_the_layer_is_noticed(name: str, folder: Path) -> None:
    want = theirs(name, torch.float64)
    model, head = loaded(folder, torch.float64)
    assert difference(ours(model, head, "torch_native", shift=0), want) > 1e-2
    wrong = [("hidden", "embedding"), ("final", "hidden")]
    norms = {part: getattr(head, f"_{part}_norm") for part in ("embedding", "hidden", "final")}
    for part, other in wrong:
        setattr(head, f"_{part}_norm", norms[other])
        assert difference(ours(model, head, "torch_native"), want) > 1e-2
        setattr(head, f"_{part}_norm", norms[part])
    weight = head._projection.weight
    weight.copy_(weight.roll(weight.shape[1] // 2, 1))  # the hidden state first
    assert difference(ours(model, head, "torch_native"), want) > 1e-2


def test_names_are_the_published_ones_and_none_is_the_models(name: str, folder: Path) -> None:
    model, head = loaded(folder, torch.float32)
    spec = head.spec
    names = set(head.weights.metas())
    assert names and all(each.startswith(spec.prefix) for each in names)
    assert not names & set(model.weights.metas())
    stored = {each for each in load_file(folder / "model.safetensors") if each.startswith(spec.prefix)}
    copies = {copy for copy, _ in spec.copies}
    assert stored >= copies and all(head.weights.split(meta) for meta in head.weights.metas().values())
    if not any("experts.gate_up_proj" in each for each in stored):
        assert names == stored - copies


@pytest.mark.parametrize("name", ["glm4_moe"], indirect=True)
def test_a_checkpoint_without_the_layer_is_refused_by_the_names_that_it_lacks(
    name: str, folder: Path, tmp_path: Path
) -> None:
    model, _ = loaded(folder, torch.float32)
    tensors = load_file(folder / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    for kept, reason in (
        (lambda key: ".layers.3." not in key, r"no tensors model\.layers\.3\.\*"),
        (lambda key: not key.endswith("3.hnorm.weight"), r"model\.layers\.3\.hnorm\.weight"),
    ):
        save_file({key: value for key, value in tensors.items() if kept(key)}, tmp_path / "model.safetensors")
        with pytest.raises(StartupError, match=reason):
            load_mtp(tmp_path, model, "cpu", plain_ops())


@pytest.mark.parametrize("name", ["glm4_moe"], indirect=True)
def test_a_layer_in_fp8_has_the_bits_of_its_values(name: str, tmp_path: Path) -> None:
    plain = mtp_checkpoint(tmp_path / "plain", name, SEED, torch.bfloat16)
    tensors = stored_tensors(fp8_checkpoint(tmp_path / "fp8", plain))
    assert tensors["model.layers.3.mlp.experts.0.up_proj.weight"].dtype == torch.float8_e4m3fn
    values = fp8_checkpoint(tmp_path / "values", plain, lambda _: values_of(tensors, torch.bfloat16))
    set_config(values, None)
    found, want, other = (
        live_fingerprints(loaded(path, torch.bfloat16)[1].weights) for path in (tmp_path / "fp8", values, plain)
    )
    assert found == want != other


def test_models_without_such_a_layer_have_no_head(folder: Path) -> None:
    assert family_config("qwen3_moe").mtp is None and family_config("gpt_oss").mtp is None
    model = load_tiny(folder, torch.float32)
    model.config = replace(model.config, mtp=None)
    with pytest.raises(StartupError, match="has no layer that predicts several tokens at once"):
        MtpHead(model, "cpu", plain_ops())
