"""Writing checkpoints, and reading whole and broken ones."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from examples.make_checkpoint.run import CheckpointSpec, cli_parser, main, make_checkpoint
from examples.make_checkpoint.tokenizer import train_tokenizer
from rollout.core.errors import BadRequest, StartupError
from rollout.core.messages.weights import UpdateWeightsFromDiskReqInput
from rollout.families.registry import load_model_config
from rollout.kernels.ops import plain_ops
from rollout.model.load import load_model, open_checkpoint, read_tensors
from tests.model_zoo import KINDS, load_tiny, logical_tensors, tiny_checkpoint, tiny_spec, trivial_placement
from tests.scheduler_harness import Harness
from tests.unit.control.test_weight_disk import holds
from weight_sync.tensor_meta import parts_of

INDEX = "model.safetensors.index.json"


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("shards", [1, 3])
def test_transformers_loads_every_key(tmp_path: Path, kind: str, shards: int) -> None:
    folder = tiny_checkpoint(tmp_path / "model", kind, 2, shards=shards, dtype="bfloat16")
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype="auto")
    model, info = loaded
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    assert model.dtype == torch.bfloat16
    assert (folder / INDEX).exists() == (shards > 1)
    assert len(list(folder.glob("*.safetensors"))) == shards


def test_same_arguments_same_bytes_in_another_process(tmp_path: Path) -> None:
    first = tiny_checkpoint(tmp_path / "a", "moe_dense_first", 7, shards=2)
    code = (
        "import sys, torch; torch.set_num_threads(1); from pathlib import Path; from tests.model_zoo import *;"
        "tiny_checkpoint(Path(sys.argv[1]), 'moe_dense_first', 7, shards=2)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "b")], check=True, timeout=60)
    assert _digests(first) == _digests(tmp_path / "b")
    other = tiny_checkpoint(tmp_path / "c", "moe_dense_first", 8, shards=2)
    weights = [name for name in _digests(first) if name.endswith(".safetensors")]
    assert all(_digests(first)[name] != _digests(other)[name] for name in weights)


def test_default_is_a_small_moe_whose_tokenizer_covers_the_vocabulary(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    config = load_model_config(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert 10e6 < sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values()) < 25e6
    assert config.moe_layer_ids == (1, 2, 3, 4)
    assert config.vocab_size == len(tokenizer)
    assert config.eos_token_ids == (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 0)


def test_tokenizer_round_trips_any_text_and_has_a_chat_template(tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_checkpoint(tmp_path / "model"))
    for text in ("What is 12 plus 345?", "  two  spaces\n\n\ttab", "Grüße, 漢字, 🎉", ""):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer("12345").input_ids) == 5
    chat = [{"role": "user", "content": "What is 2 + 2?"}]
    rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert rendered == "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(rendered).input_ids
    assert ids.count(tokenizer.eos_token_id) == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nWhat is 2 + 2?\nassistant\n"


def test_routers_of_written_checkpoints_choose_decisively(tmp_path: Path) -> None:
    """The gap between the last chosen and the first rejected expert is mostly far above bfloat16 noise."""
    tensors = logical_tensors(make_checkpoint(tmp_path / "model"))
    hidden = torch.randn(500, 256, generator=torch.Generator().manual_seed(0))
    for name, gate in tensors.items():
        if name.endswith("mlp.gate.weight"):
            logits = (hidden @ gate.float().T).sort(-1, descending=True).values
            assert 2.0 < logits.std() < 3.0
            assert (logits[:, 3] - logits[:, 4]).median() > 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 9}, "top_k"),
        ({"heads": 3}, "heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"layers": 0}, "layers"),
        ({"dense_first": 4}, "dense_first"),
        ({"vocab_size": 100}, "vocabulary"),
    ],
)
def test_a_spec_that_makes_no_model_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        make_checkpoint(tmp_path / "model", tiny_spec("moe_dense_first", 0, **change))
    assert not (tmp_path / "model").exists()


def test_a_folder_with_content_is_refused_unless_forced(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", "moe", 0, shards=3)
    before = _digests(folder)
    with pytest.raises(StartupError, match="--force"):
        make_checkpoint(folder, tiny_spec("moe", 1))
    assert _digests(folder) == before
    make_checkpoint(folder, tiny_spec("moe", 1), force=True)
    assert _digests(folder) == _digests(tiny_checkpoint(tmp_path / "fresh", "moe", 1))
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError):
        make_checkpoint(tmp_path / "file", tiny_spec("moe", 1), force=True)


def test_command_line_reaches_every_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    defaults = vars(cli_parser().parse_args(["DIR"]))
    assert {name: defaults[name] for name in CheckpointSpec.__dataclass_fields__} == vars(CheckpointSpec())
    flags = "--layers 1 --hidden-size 32 --experts 4 --top-k 2 --dense-first 0 --dtype float32 --tie --seed 5"
    assert main([str(tmp_path / "model"), *flags.split()]) == 0
    config = load_model_config(tmp_path / "model")
    assert (config.num_hidden_layers, config.num_experts, config.tie_word_embeddings) == (1, 4, True)
    assert "million parameters" in capsys.readouterr().out
    assert main([str(tmp_path / "model")]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "--force" in said.err


def test_config_saved_by_transformers_is_read(tmp_path: Path) -> None:
    """transformers 5 renames `num_experts` when it saves."""
    folder = tiny_checkpoint(tmp_path / "model", "moe_dense_first", 0)
    transformers.AutoConfig.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    assert load_model_config(tmp_path / "saved").num_experts == 8
    assert load_model_config(tmp_path / "saved").moe_layer_ids == load_model_config(folder).moe_layer_ids


@pytest.mark.parametrize("shards", [1, 4])
def test_cold_load_reads_all_shards_and_reports_progress(tmp_path: Path, shards: int) -> None:
    folder = tiny_checkpoint(tmp_path / "model", "moe_dense_first", 1, shards=shards)
    opened = open_checkpoint(folder)
    assert len(opened) == shards
    read = {name: tensor for shard in opened for name, tensor in read_tensors(shard)}
    config, seen = load_model_config(folder), []
    placement = trivial_placement(config)
    model = load_model(
        folder, config, torch.float32, "cpu", placement, plain_ops(), lambda *bytes_: seen.append(bytes_)
    )
    tensors = logical_tensors(folder)
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)
    assert read.keys() == tensors.keys() == model.weights.metas().keys()
    assert all(torch.equal(parts_of(model.weights, name)[0].content, tensor) for name, tensor in tensors.items())


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path / "model", "moe", 1, shards=3)


def _second_shard(folder: Path) -> Path:
    return folder / "model-00002-of-00003.safetensors"


def _edit_index(folder: Path, **changes: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= changes
    (folder / INDEX).write_text(json.dumps(index))


def _drop_tensor(path: Path) -> Path:
    tensors = load_file(path)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, path)
    return path


def _remove(*paths: Path) -> list[Path]:
    for path in paths:
        path.unlink()
    return list(paths)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (lambda f: _remove(_second_shard(f)), "model-00002-of-00003.safetensors is missing"),
    "truncated shard": (lambda f: _truncate(_second_shard(f)), "model-00002.*header describes .*; copy it again"),
    "empty shard": (lambda f: _second_shard(f).write_bytes(b""), "model-00002.*has 0 bytes; copy it again"),
    "not safetensors": (lambda f: _second_shard(f).write_bytes(b"hello" * 100), "model-00002.*not a safetensors file"),
    "index names an absent tensor": (
        lambda f: _drop_tensor(_second_shard(f)),
        "has no tensor .*, though .*index.json lists it there",
    ),
    "index is not JSON": (lambda f: (f / INDEX).write_text("{"), "index.json is not JSON.*; copy it again"),
    "index has no map": (lambda f: (f / INDEX).write_text("{}"), "index.json lacks its weight_map; copy it again"),
    "index leaves the folder": (lambda f: _edit_index(f, x="../y.safetensors"), "same folder"),
    "no safetensors": (lambda f: _remove(*f.glob("model*")), "no \\*.safetensors"),
    "tensor in two files": (
        lambda f: (_remove(f / INDEX), shutil.copy(_second_shard(f), f / "extra.safetensors")),
        "is both in .*/extra.safetensors and in .*/model-00002",
    ),
    "shard missing without an index": (
        lambda f: _remove(f / INDEX, _second_shard(f)),
        "has 2 of the 3 files named like model-00001-of-00003.safetensors",
    ),
    "nothing but another form of the weights": (
        lambda f: (_with_others(f, ["consolidated.safetensors"]), _remove(*f.glob("model*"))),
        "has consolidated.safetensors, but neither model.safetensors nor model.safetensors.index.json",
    ),
    "tensor missing": (lambda f: (_remove(f / INDEX), _drop_tensor(_second_shard(f))), "1 of .* tensors missing"),
    "unknown tensor": (
        lambda f: save_file({"model.layers.0.mlp.bias": torch.zeros(1)}, _new_shard(f)),
        "no tensor 'model.layers.0.mlp.bias'",
    ),
    "wrong shape": (
        lambda f: (_remove(f / INDEX), _replace_norm(f, torch.zeros(49))),
        r"model.norm.weight has shape \[49\], the model expects \[48\]",
    ),
}


def _new_shard(folder: Path) -> Path:
    (folder / INDEX).unlink()
    return folder / "new.safetensors"


def _replace_norm(folder: Path, tensor: torch.Tensor) -> Path:
    path = folder / "model-00003-of-00003.safetensors"
    save_file(load_file(path) | {"model.norm.weight": tensor}, path)
    return path


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_broken_checkpoint_is_one_line(sharded: Path, fault: str) -> None:
    load_tiny(sharded, torch.float32)
    break_it, message = FAULTS[fault]
    break_it(sharded)
    with pytest.raises(StartupError, match=message) as caught:
        load_tiny(sharded, torch.float32)
    assert "\n" not in str(caught.value)
    assert str(sharded) in str(caught.value)
    assert caught.value.__cause__ is None


OTHER_FILES = (
    "consolidated.safetensors",
    "adapter_model.safetensors",
    "value_head.safetensors",
    "optimizer.safetensors",
)


def _with_others(folder: Path, names: Iterable[str] = OTHER_FILES) -> Path:
    """Add files that other tools and training runs leave: the same tensors again, and tensors of no model."""
    whole = logical_tensors(folder)
    for name in names:
        content = whole if name.startswith("consolidated") else {"base_model.v_head.weight": torch.full((1,), 7.0)}
        save_file(content, folder / name)
    return folder


@pytest.mark.parametrize("names", [*((name,) for name in OTHER_FILES), OTHER_FILES], ids=" ".join)
def test_one_whole_file_needs_no_other(tmp_path: Path, names: tuple[str, ...]) -> None:
    """B9: without an index only model.safetensors is read, at start and in a refresh from the folder."""
    old, new = (_with_others(tiny_checkpoint(tmp_path / str(seed), "moe", seed), names) for seed in (1, 2))
    harness = Harness(old, weight_version="v1")
    assert harness.control(UpdateWeightsFromDiskReqInput, model_path=str(new), weight_version="v2").success
    assert holds(harness, load_file(new / "model.safetensors"))


@pytest.mark.parametrize("names", [(), ("consolidated.safetensors", "adapter_model.safetensors")], ids=str)
def test_shards_without_an_index_are_found_by_their_names(sharded: Path, names: tuple[str, ...]) -> None:
    """B9: names that say that a file is something else are left out."""
    tensors = logical_tensors(sharded)
    _remove(sharded / INDEX)
    weights = load_tiny(_with_others(sharded, names), torch.float32).weights
    assert all(torch.equal(parts_of(weights, name)[0].content, tensor) for name, tensor in tensors.items())


def test_an_index_says_which_files_count(sharded: Path) -> None:
    """B9: also next to a file that would count without the index."""
    tensors = logical_tensors(sharded)
    _with_others(sharded)
    save_file({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, sharded / "model.safetensors")
    weights = load_tiny(sharded, torch.float32).weights
    assert all(torch.equal(parts_of(weights, name)[0].content, tensor) for name, tensor in tensors.items())


def test_vocabulary_may_exceed_what_the_text_yields() -> None:
    assert train_tokenizer(100_000).get_vocab_size() == train_tokenizer(1359).get_vocab_size() == 1359
