"""`--enable-deterministic-inference`: engines on the kernels for CUDA, interpreted, give a token the same bits in every
batch; a trainer gets these bits; what cannot keep the promise is refused at the start.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import StartupError
from rollout.distributed.parallel import Parallel
from rollout.engine.deterministic import attention_name, check_deterministic
from rollout.numerics import engine_logprobs, use_engine_numerics
from tests.family_zoo import family_checkpoint
from tests.fixed_numerics import SETTINGS, fixed_numerics
from tests.interpreted import kernels
from tests.invariance import Ask, Facts, Server, any_differs, assert_same
from tests.model_zoo import tiny_checkpoint
from tests.numerics import Batch, disagreements, gradient_errors, gradients, trainer_model
from tests.scheduler_harness import Harness

fixed_attention = kernels("fixed_attention")
SIZES: dict[str, Any] = {"hidden_size": 24, "heads": 2, "kv_heads": 1, "head_dim": 16, "layers": 1}
SPREAD = ["qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next"]
PROMPT = tuple((7 * i) % 300 for i in range(35))  # more than a split
RANDOM = {"temperature": 1.0, "sampling_seed": 5}
ASKS = [
    Ask(PROMPT, {"max_new_tokens": 2, "temperature": 1.0}),
    Ask((5, 9), {"max_new_tokens": 3, "top_p": 0.9} | RANDOM),
]


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with fixed_numerics() as patch:
        yield patch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "dense", **SIZES)


def alone(folder: Path) -> list[Facts]:
    return Server(folder, "float32", **SETTINGS, disable_radix_cache=True).alone(ASKS, every_token=False)


def together(folder: Path) -> list[Facts]:
    """Serve all in one engine, in chunks, while others decode."""
    server = Server(folder, "float32", **SETTINGS, chunked_prefill_size=9)
    return server.together(ASKS, [1], every_token=False)


def test_bits_do_not_depend_on_the_batch_and_a_trainer_gets_them(folder: Path, patch: pytest.MonkeyPatch) -> None:
    want = alone(folder)
    assert_same(together(folder), want)
    model = trainer_model(folder, torch.float32)
    with use_engine_numerics(model, dtype=torch.float32) as numerics:
        assert numerics.batch_invariant
        assert disagreements(model, numerics, ASKS, want) == []
        model.lm_head.weight.data[PROMPT[0]] *= 1.5
        assert disagreements(model, numerics, ASKS, want), "the weights are others"

    right = fixed_attention.attend

    def split_by_batch(q_THD: torch.Tensor, *given: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(fixed_attention, "SPLIT", 32 if len(q_THD) == 1 else 64)
            right(q_THD, *given)

    patch.setattr(fixed_attention, "attend", split_by_batch)
    assert any_differs(together(folder), want)


def test_all_weights_of_a_trainer_with_experts_have_gradients(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    model = trainer_model(family_checkpoint(tmp_path / "m", "qwen3_moe", 3), torch.float32)
    ids = torch.tensor([[3, 5, 7]])
    with use_engine_numerics(model, dtype=torch.float32):
        engine_logprobs(model(input_ids=ids).logits[:, :-1], ids[:, 1:]).sum().backward()
    assert [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()] == []


@pytest.mark.full
@pytest.mark.parametrize("family", SPREAD)
def test_every_kind_of_layer(family: str, tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    path = family_checkpoint(tmp_path / "m", family, 3)
    want = alone(path)
    assert_same(together(path), want)
    model = trainer_model(path, torch.float32, family)
    with use_engine_numerics(model, dtype=torch.float32) as numerics:
        assert disagreements(model, numerics, ASKS, want) == []
        found = gradients(model, Batch.of(ASKS, want), by_engine=True)
    wanted = gradients(model, Batch.of(ASKS, want), numerics.routes)
    assert max(gradient_errors(found, wanted).values()) < 2e-4, "another order of sums in float32"


# --- refusals --------------------------------------------------------------------------------------------------------


def test_plain_torch_is_refused(folder: Path) -> None:
    settings = {"enable_deterministic_inference": True, "disable_native_kernels": True}
    with pytest.raises(
        StartupError, match="bits would depend on its batch: layers and attention and sampling on plain"
    ):
        Harness(folder, enable_return_routed_experts=False, **settings)


def test_attention_of_a_library_is_refused_by_name(folder: Path, patch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartupError, match="depend on its batch: attention on plain torch"):
        Harness(folder, enable_return_routed_experts=False, **SETTINGS | {"attention_backend": "torch_native"})


def test_the_compiled_operators_of_a_cpu_are_deterministic(folder: Path) -> None:
    Harness(folder, enable_return_routed_experts=False, enable_deterministic_inference=True)


def test_a_rank_that_cannot_refuses_for_all() -> None:
    args, fine = ServerArgs(enable_deterministic_inference=True), {"batch_invariant": True, "batch_invariance_note": ""}

    class OtherCannot:
        def all_agree(self, mine: bool) -> bool:
            return False

    check_deterministic(args, fine, Parallel().tp)
    with pytest.raises(StartupError, match="another rank of the engine cannot"):
        check_deterministic(args, fine, OtherCannot())  # type: ignore[arg-type]
    check_deterministic(ServerArgs(), fine | {"batch_invariant": False}, OtherCannot())  # type: ignore[arg-type]


def test_the_backend_with_fixed_splits_is_taken_on_cuda_alone() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    wanted = ServerArgs(enable_deterministic_inference=True)
    assert attention_name(wanted, cuda) == "fixed_splits"
    assert attention_name(wanted, cpu) == attention_name(ServerArgs(), cuda) == "auto"
    named = ServerArgs(enable_deterministic_inference=True, attention_backend="flashinfer")
    assert attention_name(named, cuda) == "flashinfer"
