"""A stand-in for CUDA graphs on the CPU: records operator calls, and makes them again on the very same tensors.

It follows the contract of `torch.cuda.graph` as its documentation and the CUDA programming guide state it, traps
included:

* A capture must not wait for the device: reading a tensor's numbers on the host raises, and so does what allocates by
  them (`nonzero`, a mask as an index) or brings host data along (`torch.tensor`).
* A replay reads and writes the memory of the capture.  A tensor that took the place of an input is not seen, nor where
  an input's tensor was moved to.
* What a capture allocates lies in the pool's memory, which other captures use too: after a capture and after a replay
  it holds garbage.  Results are read from tensors that were there before.
* Graphs of a pool do not run while one of them is captured, nor after the pool was closed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

WAITS = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__", "equal"}
FROM_HOST = {"tensor", "from_numpy", "as_tensor", "pin_memory"}
DATA_DEPENDENT = {"nonzero", "masked_select", "_local_scalar_dense", "unique_dim", "_unique2", "bincount", "equal"}


class CaptureError(RuntimeError):
    """A capture did what no capture may."""


class _Thread(threading.local):
    """The captures under way on this thread, each rank's: at most one."""

    def __init__(self) -> None:
        self.captures: list[_Capture] = []


_here = _Thread()


def is_capturing() -> bool:
    """Return whether a capture is under way, as `torch.cuda.is_current_stream_capturing` does."""
    return bool(_here.captures)


def forbid_in_capture(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `method` to raise in a capture, as a planner that copies from the host would."""

    def guarded(*args: Any, **kwargs: Any) -> Any:
        if is_capturing():
            raise CaptureError(f"{method.__qualname__} in a capture")
        return method(*args, **kwargs)

    return guarded


def launch(kernel: Callable[[], None], name: str = "kernel") -> None:
    """Run a kernel that is not an operator of torch; one that is launched in a capture runs at every replay, too.

    What the kernel itself calls is not recorded.
    """
    captures, _here.captures = _here.captures, []
    try:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            kernel()
    finally:
        _here.captures = captures
    if _here.captures:
        _here.captures[-1].calls.append(_Call(name, kernel, (), {}, []))


@dataclass
class _Call:
    """A captured call.  `args`: the memory that it was given; `fresh`: its results that lie in memory of the pool."""

    name: str
    operator: Any
    args: Any
    kwargs: dict[str, Any]
    fresh: list[tuple[int, torch.Tensor]]


class _HostTraps(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in WAITS:
            raise CaptureError(f"Tensor.{name} in a capture waits for the device")
        if name in FROM_HOST:
            raise CaptureError(f"{name} in a capture copies from the host")
        return func(*args, **(kwargs or {}))


class _Capture(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.allocated: list[torch.Tensor] = []
        self._traps = _HostTraps()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __enter__(self) -> _Capture:
        if _here.captures:
            raise CaptureError("a capture in a capture")
        _here.captures.append(self)
        self._traps.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._traps.__exit__(*error)
        _here.captures.remove(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        masks = [x for x in tree_leaves(args[1:]) if isinstance(x, torch.Tensor) and x.dtype == torch.bool]
        if name in DATA_DEPENDENT or (name == "index" and masks):
            raise CaptureError(f"{func} in a capture allocates by what is on the device, or waits for it")
        result = func(*args, **kwargs)
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        fresh = [
            (place, x)
            for place, x in enumerate(tree_leaves(result))
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in given
        ]
        self.allocated += [x for _, x in fresh]
        if name.startswith(("empty", "new_empty")):
            return result
        if fresh or func._schema.is_mutable:  # a view is one still
            held = tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, (args, kwargs))
            self.calls.append(_Call(name, func, *held, fresh))
        return result


class StandInGraphPool:
    """A `GraphPool`.  `num_captures` and `num_replays` count over all pools: `reset_counts`.

    `recordings`: the names of the calls of each whole recording of this pool, in the order of their captures.
    """

    num_captures = 0
    num_replays = 0
    warm_ups = 1

    def __init__(self) -> None:
        self.recordings: list[list[str]] = []

    @classmethod
    def reset_counts(cls) -> None:
        cls.num_captures = cls.num_replays = 0

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        for _ in range(self.warm_ups):
            run()
        with _Capture() as capture:
            if run() is not None:
                raise CaptureError("what a capture returns lies in the pool's memory: write it to a tensor of your own")
        StandInGraphPool.num_captures += 1
        self.recordings.append([call.name for call in capture.calls])
        _poison(capture.allocated)
        return lambda: self._replay([(capture, None)])

    def capture_in_pieces(self, run: Callable[[Callable[[Callable[[], None]], None]], None]) -> Callable[[], None]:
        for _ in range(self.warm_ups):
            run(lambda work: work())
        pieces: list[tuple[_Capture, Callable[[], None] | None]] = []
        capture = _Capture()

        def between(work: Callable[[], None]) -> None:
            nonlocal capture
            capture.__exit__(None, None, None)
            work()
            pieces.append((capture, work))
            capture = _Capture()
            capture.__enter__()

        capture.__enter__()
        try:
            run(between)
        finally:
            capture.__exit__(None, None, None)
        pieces.append((capture, None))
        StandInGraphPool.num_captures += 1
        for piece, _ in pieces:
            _poison(piece.allocated)
        return lambda: self._replay(pieces)

    def _replay(self, pieces: list[tuple[_Capture, Callable[[], None] | None]]) -> None:
        if is_capturing():
            raise CaptureError("a replay in a capture")
        for piece, work in pieces:
            StandInGraphPool.num_replays += 1
            with _disable_current_modes():  # a mode that counts launches of the host does not see these
                _play(piece.calls)
            if work is not None:
                work()
        with _disable_current_modes():
            for piece, _ in pieces:
                _poison(piece.allocated)


def _play(calls: list[_Call]) -> None:
    for call in calls:
        results = tree_leaves(call.operator(*call.args, **call.kwargs))
        for place, held in call.fresh:
            held.copy_(results[place])


def _poison(allocated: list[torch.Tensor]) -> None:
    """Fill the tensors that the capture allocated with garbage, as another graph of the pool would leave it there."""
    for held in allocated:
        held.fill_(torch.nan if held.is_floating_point() else 1 if held.dtype == torch.bool else 113)
