"""`lockstep make-checkpoint --family`: each is written, transformers reads it, and the engine serves it alike."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from examples.make_checkpoint import families as checkpoint_families
from examples.make_checkpoint.families import SETTINGS
from examples.make_checkpoint.run import main, make_checkpoint
from examples.make_checkpoint.spec import DENSE_FAMILIES, FAMILIES, OWN_FAMILIES, CheckpointSpec
from rollout.core.errors import BadRequest, StartupError
from rollout.families.registry import load_model_config
from rollout.server.engine import Engine

SIZES: dict[str, Any] = {
    "vocab_size": 384, "hidden_size": 64, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 16, "experts": 16,
    "top_k": 3, "intermediate_size": 96, "moe_intermediate_size": 32, "context_length": 512, "dtype": "float32",
}  # fmt: skip
PROMPT = [5, 77, 301, 9, 140, 33, 220]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(family) / "model", CheckpointSpec(family=family, shards=2, **SIZES))


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_every_family_is_written_in_one_way() -> None:
    assert {*OWN_FAMILIES, *SETTINGS} == set(FAMILIES) and not {*OWN_FAMILIES} & {*SETTINGS}


def test_same_arguments_same_bytes(family: str, folder: Path, tmp_path: Path) -> None:
    spec = CheckpointSpec(family=family, shards=2, **SIZES)
    assert digests(make_checkpoint(tmp_path / "again", spec)) == digests(folder)
    other = digests(make_checkpoint(tmp_path / "other", CheckpointSpec(family=family, shards=2, seed=1, **SIZES)))
    assert all(other[name] != digest for name, digest in digests(folder).items() if name.endswith(".safetensors"))


def test_transformers_finds_every_tensor_and_none_too_many(folder: Path) -> None:
    _, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert transformers.AutoTokenizer.from_pretrained(folder)("What is 1 + 1?").input_ids


def test_routers_of_made_checkpoints_choose_decisively(family: str, folder: Path) -> None:
    """The last chosen expert is mostly well above the first rejected one."""
    gates = [t for name, t in tensors_of(folder).items() if name.endswith(("mlp.gate.weight", "mlp.router.weight"))]
    assert bool(gates) == (family not in DENSE_FAMILIES)
    hidden = torch.randn(500, 64, generator=torch.Generator().manual_seed(0))
    for gate in gates:
        logits = (hidden @ gate.T).sort(-1, descending=True).values
        assert 1.5 < logits.std() < 3.5 and (logits[:, 2] - logits[:, 3]).median() > 0.1


def test_bfloat16_but_for_the_correction_bias(family: str, tmp_path: Path) -> None:
    written = make_checkpoint(tmp_path / "model", CheckpointSpec(family=family, **SIZES | {"dtype": "bfloat16"}))
    for name, tensor in tensors_of(written).items():
        assert tensor.dtype == (torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16), name
    assert json.loads((written / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_engine_reads_the_configuration(family: str, folder: Path) -> None:
    config = load_model_config(folder)
    assert (config.num_hidden_layers, config.is_moe) == (4, family not in DENSE_FAMILIES)
    assert config.num_experts == (16 if config.is_moe else 0)
    assert 2 in config.eos_token_ids


@pytest.mark.full
def test_the_engine_generates_what_transformers_does(folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        for _ in range(12):
            logits = model(ids, use_cache=False).logits[:, -1]
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    engine = Engine(model_path=str(folder), dtype="float32", skip_tokenizer_init=True, max_total_tokens=1024)
    try:
        params = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
        (output,) = engine.generate(input_ids=[PROMPT], sampling_params=params)
    finally:
        engine.close()
    assert output["output_ids"] == ids[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"family": "gpt2"}, "no family 'gpt2'; known are qwen3_moe, qwen3, .*gpt_oss"),
        ({"family": "llama", "dense": True}, "llama has no dense form"),
        ({"family": "qwen3_5", "head_dim": 12}, "head_dim of qwen3_5 must be a multiple of 8"),
    ],
)
def test_what_makes_no_model_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        make_checkpoint(tmp_path / "model", CheckpointSpec(**SIZES | change))
    assert not (tmp_path / "model").exists()


def test_the_command_says_which_families_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "model"), "--family", "bert"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "no family 'bert'" in line and all(name in line for name in FAMILIES)


def test_a_family_that_this_transformers_does_not_have_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3.5 is one, which transformers 5.0 and 5.1 do not know."""
    # transformers executes itself again where its processors are imported: this file's module may not be the code's.
    monkeypatch.setattr(checkpoint_families.transformers, "CONFIG_MAPPING", {})
    with pytest.raises(StartupError, match="does not support the family llama: install a newer one"):
        make_checkpoint(tmp_path / "model", CheckpointSpec(family="llama", layers=1))
