"""A small model of every family in each dtype, other contents for it, and its answers to one request at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar
from unittest import mock

import numpy as np
import torch
from transformers.utils import logging as transformers_logging

from rollout.control import weight_queue
from rollout.core.messages.io_struct import GetStateReqInput, ReplayedRoutes
from rollout.core.specs.layer_specs import AttentionSpec, GatedDeltaSpec, LatentAttentionSpec
from rollout.core.specs.model_config import ModelConfig
from rollout.engine import build_control
from tests.family_zoo import FAMILIES, SEEING, family_checkpoint, family_config
from tests.in_turn import InTurn
from tests.local_refresh import refresh
from tests.model_zoo import KINDS, logical_tensors, tiny_checkpoint, tiny_spec
from tests.scheduler_harness import Harness, Result
from tests.tiny_tokenizer import write_tiny_tokenizer

if TYPE_CHECKING:
    from tests.mixed.schedule import Ask, Replay

NUM_CONTENTS = 3
DTYPES = ("float32", "bfloat16")
_MODEL_SEED = 3
_MAX_ANSWERS = 512  # kept for all models together; one schedule asks for fewer
_MAX_ENGINES = 24  # kept of models in other formats than plain; engines of plain models all stay
_ROOM = 1024  # KV slots of an engine for one request alone
_CHANGES: dict[str, dict[str, Any]] = {  # so that requests go beyond two pages of windows
    "gpt_oss": {"max_position_embeddings": 640},
    "gpt_oss, long window": {"max_position_embeddings": 640},
}


V = TypeVar("V")
Prefixes = Literal["tokens", "snapshots", "pages"]
"""The prefixes that an engine finds: any, prefixes up to a snapshot, or whole pages."""


Format = Literal["plain", "w8", "fp8", "int4", "int4-128"]
KVFormat = Literal["auto", "fp8_e4m3"]


class Form(NamedTuple):
    """The formats in which an engine holds experts, projections (`linears`), and keys and values (`kv`)."""

    experts: Format = "plain"
    linears: Format = "plain"
    kv: KVFormat = "auto"

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of an engine."""
        return {
            "cpu_weight_format": self.experts,
            "cpu_linear_format": self.linears,
            "kv_cache_dtype": self.kv,
        }


PLAIN = Form()


@dataclass(frozen=True)
class Shape:
    """The facts of a model that a schedule has to know."""

    family: str
    dtype: str
    vocab_size: int
    context_length: int
    num_layers: int  # with experts
    num_experts: int
    top_k: int
    prefixes: Prefixes
    has_latents: bool

    @property
    def is_moe(self) -> bool:
        return self.num_layers > 0

    @property
    def can_be_held(self) -> bool:
        """True if weights can be held in fewer bits."""
        return self.dtype == "bfloat16"

    def routes(self, replay: Replay) -> ReplayedRoutes:
        """Return routes as a request brings them along."""
        generator = np.random.default_rng(replay.seed)
        order_RLE = generator.random((replay.start + replay.rows, self.num_layers, self.num_experts)).argsort(-1)
        rows_RLK = order_RLE[replay.start :, :, : self.top_k].astype("<u2")
        return ReplayedRoutes(data=rows_RLK.tobytes(), shape=rows_RLK.shape, start=replay.start)


def all_shapes() -> list[Shape]:
    """Return the shapes of every family in each dtype, but not of vision families: their text is another family's."""
    families = [family for family in FAMILIES if family not in SEEING]
    return [_shape(family, dtype) for family in families for dtype in DTYPES] + [
        _tiny_shape(kind, dtype) for kind in KINDS for dtype in DTYPES
    ]


def _tiny_shape(kind: str, dtype: str) -> Shape:
    """Return the shape of a checkpoint of `tests.model_zoo`."""
    spec = tiny_spec(kind)
    return Shape(
        family=kind,
        dtype=dtype,
        vocab_size=spec.vocab_size,
        context_length=spec.context_length,
        num_layers=0 if spec.dense else spec.layers - spec.dense_first,
        num_experts=spec.experts,
        top_k=spec.top_k,
        prefixes="tokens",
        has_latents=False,
    )


def _shape(family: str, dtype: str) -> Shape:
    config = family_config(family)
    changes = _CHANGES.get(family, {})
    return Shape(
        family=family,
        dtype=dtype,
        vocab_size=config.vocab_size,
        context_length=changes.get("max_position_embeddings", config.max_position_embeddings),
        num_layers=len(config.moe_layer_ids),
        num_experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        prefixes=_prefixes(config),
        has_latents=any(isinstance(layer.attention, LatentAttentionSpec) for layer in config.layers),
    )


def _prefixes(config: ModelConfig) -> Prefixes:
    kinds = [layer.attention for layer in config.layers]
    if any(isinstance(kind, GatedDeltaSpec) for kind in kinds):
        return "snapshots"
    return "pages" if any(isinstance(kind, AttentionSpec) and kind.window for kind in kinds) else "tokens"


class Kept(Generic[V]):
    """The values that were asked for last, at most `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[Hashable, V] = OrderedDict()

    def value(self, key: Hashable, make: Callable[[], V]) -> V:
        """Return the value of `key`, which `make` returns if it is not kept."""
        known = self._values.get(key)
        if known is None:
            known = self._values[key] = make()
            if len(self._values) > self._most:
                self._values.popitem(last=False)
        self._values.move_to_end(key)
        return known


class Zoo:
    """Models are written into `folder` when they are first asked for; another process may have done it before."""

    def __init__(self, folder: Path) -> None:
        self.shapes = all_shapes()
        self._folder = folder
        self._models: dict[tuple[str, str, Form], Model] = {}
        self._answers: Kept[Result] = Kept(_MAX_ANSWERS)
        self._engines: Kept[Harness] = Kept(_MAX_ENGINES)

    def model(self, family: str, dtype: str, form: Form = PLAIN) -> Model:
        model = self._models.get((family, dtype, form))
        if model is None:
            shape = next(shape for shape in self.shapes if (shape.family, shape.dtype) == (family, dtype))
            plain = None if form == PLAIN else self.model(family, dtype)
            engines: Kept[Harness] = Kept(NUM_CONTENTS) if plain is None else self._engines
            folder = self._folder / f"{family}-{dtype}"
            model = self._models[family, dtype, form] = Model(folder, shape, form, plain, self._answers, engines)
        return model

    def write_all(self) -> None:
        for shape in self.shapes:
            self.model(shape.family, shape.dtype)

    def build_all(self) -> None:
        """Build every engine that stays and computes requests alone, so that its memory is no growth by schedules."""
        for shape in self.shapes:
            self.model(shape.family, shape.dtype).build_all()


class Model:
    """`contents[c]`: every tensor by name; `changed`: the names of tensors that are not the same in all contents.

    `plain`: the model whose tensors are held in `form` here; None: this one.
    """

    def __init__(
        self,
        folder: Path,
        shape: Shape,
        form: Form,
        plain: Model | None,
        answers: Kept[Result],
        engines: Kept[Harness],
    ) -> None:
        self.folder = folder
        self.shape = shape
        self.form = form
        self._plain = plain
        self._answers, self._engines = answers, engines
        if not (folder / "tokenizer.json").is_file():
            _write(folder, shape)

    @cached_property
    def contents(self) -> list[dict[str, torch.Tensor]]:
        if self._plain is not None:
            return self._plain.contents
        base = logical_tensors(self.folder)
        return [base | _changed(base, content) for content in range(NUM_CONTENTS)]

    @cached_property
    def changed(self) -> list[str]:
        return [name for name in self.contents[0] if _changes(name)]

    def build_all(self) -> None:
        for content in range(NUM_CONTENTS):
            self._engine(content)

    def alone(self, ask: Ask, seed: int, content: int, most: int | None = None) -> Result:
        """Return the result of a sample of `ask` on an engine of this content that has nothing else to do.

        Its prompt is computed in one piece, without a prefix; no mask has too many ids.  `most`: tokens to compare.
        """
        fields = request_fields(ask, self.shape)
        params = ask.params | {"sampling_seed": seed}
        if most is not None:
            params["max_new_tokens"] = min(most, ask.new_tokens)
        return self._answer(ask.prompt, params, fields, content)

    def scored(self, ask: Ask, token_ids: list[int], content: int) -> Result:
        """Score the prompt of `ask` and `token_ids` together as one prompt."""
        fields = request_fields(ask, self.shape) | {
            "return_logprob": True,
            "logprob_start_len": 0,
            "return_sampling_mask": False,
            "routed_experts_start_len": 0,
        }
        params = {"max_new_tokens": 0, "temperature": ask.params["temperature"]}
        return self._answer(ask.prompt + token_ids, params, fields, content)

    def _answer(self, prompt: list[int], params: dict[str, Any], fields: dict[str, Any], content: int) -> Result:
        key = (self.shape, self.form, content, repr((prompt, params, fields)))
        return self._answers.value(key, lambda: self._compute(prompt, params, fields, content))

    @torch.inference_mode()
    def _compute(self, prompt: list[int], params: dict[str, Any], fields: dict[str, Any], content: int) -> Result:
        return self._engine(content).generate([prompt], params, **fields)[0]

    def _engine(self, content: int) -> Harness:
        key = (self.shape, self.form, content)
        engine = self._engines.value(key, lambda: self._build(content))
        engine.results.clear()
        return engine

    def _build(self, content: int) -> Harness:
        with in_turn():
            engine = Harness(
                self.folder,
                dtype=self.shape.dtype,
                max_total_tokens=_ROOM,
                chunked_prefill_size=-1,
                disable_radix_cache=True,
                max_running_requests=1,
                enable_return_routed_experts=self.shape.is_moe,
                **self.form.settings,
            )
            changed = {name: self.contents[content][name] for name in self.changed}
            assert refresh(engine, changed, f"content {content}", coverage="partial").success
        state = engine.control(GetStateReqInput).data
        assert state is not None and state["batch_invariant"], state
        engine.scheduler.runner.recorded = None  # the model's own code runs each forward
        return engine


def request_fields(ask: Ask, shape: Shape) -> dict[str, Any]:
    """Return the fields that decide the result of a request, apart from its prompt and `sampling_params`."""
    return {
        "return_logprob": ask.logprobs,
        "logprob_start_len": ask.scored,
        "top_logprobs_num": ask.top,
        "token_ids_logprob": ask.chosen or None,
        "return_routed_experts": ask.routes,
        "routed_experts_start_len": ask.routes_start,
        "return_sampling_mask": ask.mask is not None,
        "sampling_logprobs_mode": ask.mask or "selected",
        "replay": None if ask.replay is None else shape.routes(ask.replay),
    }


def _write(folder: Path, shape: Shape) -> None:
    if shape.family in KINDS:
        tiny_checkpoint(folder, shape.family, _MODEL_SEED, dtype=shape.dtype)
        return
    transformers_logging.disable_progress_bar()
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # a longer context than the rotation was scaled for is fine here
    changes = _CHANGES.get(shape.family, {})
    family_checkpoint(folder, shape.family, _MODEL_SEED, getattr(torch, shape.dtype), **changes)
    transformers_logging.set_verbosity(before)
    write_tiny_tokenizer(folder)


@contextmanager
def in_turn() -> Iterator[None]:
    """Make engines that are built inside do weight I/O in the thread of their loop, without pauses between parts."""
    with (
        mock.patch.object(weight_queue, "ThreadPoolExecutor", InTurn),
        mock.patch.object(weight_queue, "IoThread", InTurn),
        mock.patch.object(build_control, "WeightPace", lambda *_: None),
    ):
        yield


def _changes(name: str) -> bool:
    """Tell whether contents differ in this tensor: few do, in layer 0, so that a commit is quick and shows."""
    return "experts" not in name and ".0." in name


def _changed(base: Mapping[str, torch.Tensor], content: int) -> dict[str, torch.Tensor]:
    """Return the tensors of `base` that another content has changed."""
    generator = torch.Generator().manual_seed(content)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in base.items() if content else ():
        if _changes(name):
            noise = torch.randn(tensor.shape, generator=generator)
            scale = 0.3 * (tensor.float().std() if tensor.numel() > 1 else 1.0)
            found[name] = (tensor.float() + noise * scale).to(tensor.dtype)
    return found
