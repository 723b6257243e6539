"""Engines over tokenizers as published: text, stop strings and end tokens without a checkpoint's code."""

from __future__ import annotations

import builtins
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.make_checkpoint.run import make_checkpoint
from examples.make_checkpoint.spec import CheckpointSpec
from rollout.server.engine import Engine
from tests.byte_level_files import write_moonshot

SPEC = CheckpointSpec(
    family="deepseek_v3", layers=2, hidden_size=32, heads=2, kv_heads=2, head_dim=16, intermediate_size=32, experts=4,
    top_k=2, moe_intermediate_size=16, dtype="float32",
)  # fmt: skip


@pytest.fixture(scope="module")
def moonshot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Any, Path]]:
    """An engine on the main thread over files as Kimi-K2 has them, and over code that leaves a mark."""
    folder = make_checkpoint(tmp_path_factory.mktemp("model") / "m", SPEC)
    mark = folder / "mark"
    (folder / "tokenizer.json").unlink()
    reference = write_moonshot(folder)
    for name in ("tokenization_kimi", "configuration_deepseek", "modeling_deepseek"):
        (folder / f"{name}.py").write_text(f"import pathlib\npathlib.Path({str(mark)!r}).write_text('ran')\n")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "input", lambda *prompt: pytest.fail(f"asked {prompt}"))
        engine = Engine(model_path=str(folder), max_total_tokens=1024, random_seed=1)
    yield engine, reference, mark
    engine.close()


def test_text_goes_in_and_out_and_no_code_runs_b6(moonshot: tuple[Engine, Any, Path]) -> None:
    """B6: the start ended with "contains custom code", or asked on the console."""
    engine, reference, mark = moonshot
    params = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True, "skip_special_tokens": False}
    answer = engine.generate(text="Hello 世界", sampling_params=params)
    assert answer["meta_info"]["prompt_tokens"] == len(reference.encode("Hello 世界"))
    same = engine.generate(input_ids=reference.encode("Hello 世界"), sampling_params=params)
    assert answer["output_ids"] == same["output_ids"]
    known = [index for index in answer["output_ids"] if index < reference.n_vocab]
    assert answer["text"] == reference.decode(known)
    assert not mark.exists()


def test_stop_strings_are_found_in_the_text_of_ranks_b6(moonshot: tuple[Engine, Any, Path]) -> None:
    engine, reference, _ = moonshot
    (token_id,) = reference.encode("世界")[:1]
    wanted = reference.decode([token_id])
    params = {"temperature": 0.0, "max_new_tokens": 8, "logit_bias": {str(token_id): 1000}}
    answer = engine.generate(text="Hello", sampling_params=params | {"stop": [wanted * 2]})
    assert answer["output_ids"] == [token_id] * 2 and answer["text"] == ""


def test_the_end_token_of_the_tokenizer_ends_a_sample_b6(moonshot: tuple[Engine, Any, Path]) -> None:
    engine, reference, _ = moonshot
    end = reference.encode_single_token("[EOS]")
    answer = engine.generate(text="Hello", sampling_params={"max_new_tokens": 8, "logit_bias": {str(end): 1000}})
    assert answer["output_ids"] == [end]
