"""A forward played from a tape: the operator calls of a model, recorded once and played again by one call.

    first steps     the model runs in Python, under a recorder     -> calls, with inputs and results by number
    later steps     the tape, on the step's own tensors            -> the same operators, without Python between them

A recording holds for any number of tokens.  It is used after a step of another size made the same calls with the same
constants.  A model whose Python branches on the batch, or that counts its tokens, always runs in Python.
The model's own code stays the only definition of a forward.  CUDA graphs record the same calls (`graph_runner`).

Shapes: T tokens, D hidden, L MoE layers, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rollout.core.forward_batch import ForwardBatch
from rollout.layers.context import ForwardContext
from rollout.model.decoder import DecoderForCausalLM

_MAX_TAPES = 4


@dataclass(frozen=True)
class _Slot:
    """The number of an input or a result."""

    number: int


@dataclass(frozen=True)
class Call:
    """One call of an operator; tensors that are neither inputs nor results are constants."""

    operator: Any
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Recording:
    """The calls of one forward, and the slot of its result."""

    calls: tuple[Call, ...]
    result: int

    def is_same(self, other: Recording) -> bool:
        """Return whether both make the same calls, with equal constants and with identical tensors among them."""
        if self.result != other.result or len(self.calls) != len(other.calls):
            return False
        return all(
            one.operator is two.operator and all(map(_is_same, one.arguments, two.arguments))
            for one, two in zip(self.calls, other.calls)
        )

    def tape(self, num_inputs: int) -> Any:
        """Return the recording as a tape of the compiled player."""
        tape = torch.classes.lockstep.Tape(num_inputs)
        for call in self.calls:
            schema = call.operator._schema
            tape.call(schema.name, schema.overload_name)
            for value in call.arguments:
                if isinstance(value, _Slot):
                    tape.slot(value.number)
                elif isinstance(value, list | tuple):
                    tape.integers(list(value))
                else:
                    tape.constant(value)
        tape.seal(self.result)
        return tape


@dataclass(frozen=True)
class Tape:
    """The compiled player of a recording, and the operators that it calls, in order."""

    player: Any
    operators: tuple[Any, ...]

    def play(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        result: torch.Tensor = self.player.play(inputs)
        return result

    def play_clocked(self, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
        """Play the tape, and also return the nanoseconds of each operator, from call to return."""
        result: tuple[torch.Tensor, list[int]] = self.player.play_clocked(inputs)
        return result


class _Recorder(TorchDispatchMode):
    """Runs every operator, and notes its call until one comes that a tape cannot hold."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.obstacle: str | None = None
        self._held: list[Any] = list(inputs)  # so that no two tensors have one id
        self._slots = {id(tensor): _Slot(i) for i, tensor in enumerate(inputs)}
        self._count = len(inputs)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: otherwise torch would import its compiler in the first step, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = tuple(self._named(value) for value in _every_argument(func, args, kwargs or {}))
        if any(_is_number_for_tensor(*pair) for pair in zip(func._schema.arguments, arguments)):
            self.obstacle = f"{func} takes a number for a tensor"
        result = func(*args, **(kwargs or {}))
        self.calls.append(Call(func, arguments))
        for value in result if isinstance(result, tuple) else [result] * len(func._schema.returns):
            if not isinstance(value, torch.Tensor):
                self.obstacle = f"{func} returns {type(value).__name__}"
            self._held.append(value)
            self._slots[id(value)] = _Slot(self._count)
            self._count += 1
        return result

    def recording(self, result: torch.Tensor) -> Recording | None:
        """Return the calls so far as a recording; None if a tape cannot hold them."""
        if self.obstacle is not None or id(result) not in self._slots:
            return None
        return Recording(tuple(self.calls), self._slots[id(result)].number)

    def _named(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            self._held.append(value)
            return self._slots.get(id(value), value)
        if isinstance(value, list | tuple) and not all(isinstance(item, int) for item in value):
            self.obstacle = "a list of other things than integers is an argument"
        return value


class RecordedForward:
    """The forward by tapes, called like the model.  It needs one rank and the compiled operators.

    `play` plays a tape on inputs; a measurement may replace it.
    """

    def __init__(self, model: DecoderForCausalLM) -> None:
        self.play: Callable[[Tape, list[torch.Tensor]], torch.Tensor] = Tape.play
        self._model = model
        self._tapes: dict[Hashable, Tape] = {}
        self._recordings: dict[Hashable, tuple[int, Recording]] = {}
        self._never: set[Hashable] = set()  # forwards that differ between two sizes, or cannot be recorded

    def __call__(
        self, batch: ForwardBatch, context: ForwardContext, key: Hashable, written: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, bool]:
        """Return the final-normed hidden states [T, D], and whether a tape was played, which calls no hook.

        `key`: further facts on which the calls depend, such as the placement in force; `written`: the step's tensors
        that its hooks write.
        """
        operands = context.attention.operands
        if operands is None or batch.num_tokens == 0:
            return self._model(batch, context), False
        forced = [] if batch.forced_routes is None else [batch.forced_routes]
        adapters = [] if batch.adapters is None else [batch.adapters]
        kept = [*(batch.states or ()), *(batch.window or ())]
        inputs = [batch.input_ids, batch.positions, batch.out_cache_loc, *operands, *kept, *written, *forced, *adapters]
        key = (key, len(written), len(forced), len(adapters), len({id(tensor) for tensor in inputs}))
        tape = self._tapes.get(key)
        if tape is not None:
            return self.play(tape, inputs), True
        return self._record(batch, context, key, inputs), False

    def _record(
        self, batch: ForwardBatch, context: ForwardContext, key: Hashable, inputs: list[torch.Tensor]
    ) -> torch.Tensor:
        known = self._recordings.get(key)
        if key in self._never or (known is not None and known[0] == batch.num_tokens):
            return self._model(batch, context)
        recorder = _Recorder(inputs)
        with recorder:
            hidden_TD = self._model(batch, context)
        recording = recorder.recording(hidden_TD)
        if recording is None or (known is not None and not known[1].is_same(recording)):
            self._never.add(key)
        elif known is None:
            self._recordings[key] = (batch.num_tokens, recording)
        else:
            self._forget_oldest()
            self._tapes[key] = Tape(recording.tape(len(inputs)), tuple(call.operator for call in recording.calls))
            del self._recordings[key]
        return hidden_TD

    def _forget_oldest(self) -> None:
        while len(self._tapes) >= _MAX_TAPES:
            del self._tapes[next(iter(self._tapes))]


def _every_argument(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return all arguments in the order of the schema, defaults filled in."""
    declared = func._schema.arguments
    rest = [kwargs.get(item.name, item.default_value) for item in declared[len(args) :]]
    return [*args, *rest]


def _is_number_for_tensor(declared: Any, value: Any) -> bool:
    """Return whether a number stands for a tensor, as in `ids // 2`: a tape cannot hold the tensor that torch makes."""
    return isinstance(value, int | float) and "Tensor" in str(declared.type)


def _is_same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(two, torch.Tensor):
        return one is two
    return type(one) is type(two) and one == two
