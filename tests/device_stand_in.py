"""A device without a device: torch's private backend, computed on the CPU, on which every wait of the host is seen.

Operators compute at once, as their results come in the order of one stream anyway.  Transfers are as CUDA's are:

    to the device, from pinned memory, non_blocking    read when the stream gets there: changed before, it is an error
    to pinned memory, non_blocking                     garbage until the host has waited for it
    from or to pageable memory, or blocking            the host waits for all that was enqueued
    .item(), bool(), .tolist(), nonzero, a mask as index, an index on the host      the same

While `refusing`, a wait raises `HostWaitsError`; to wait for an event is no such wait.  Tensors on two devices in one
operator are an error, but for numbers.  Not seen: what a compiled kernel does within one operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.streams_stand_in import Streams

_NAME = "privateuseone"
DEVICE = torch.device(_NAME, 0)

# Their results, or the sizes of them, are needed on the host.
_READS = {"item", "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "unique_dim", "_unique2"}
_READS |= {"unique_consecutive", "bincount", "allclose"}
_INDEXES = {"index", "index_put", "index_put_", "_index_put_impl_"}
_MOVES = {"to", "_to_copy"}


class HostWaitsError(AssertionError):
    """The host would wait for the device here."""


class RaceError(AssertionError):
    """Memory was changed while a transfer that reads it was in flight."""


class DeviceTensor(torch.Tensor):
    """`content`: the tensor's numbers, on the CPU."""

    content: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, content: torch.Tensor) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            content.size(),
            strides=content.stride(),
            storage_offset=content.storage_offset(),
            dtype=content.dtype,
            device=DEVICE,
        )
        made.content = content
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} without a `Device`")

    def data_ptr(self) -> int:
        return self.content.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.content.untyped_storage()

    def tolist(self) -> Any:
        return self.cpu().tolist()


class Device(TorchDispatchMode):
    """Entered around everything that has tensors on `DEVICE`.  `num_waits` of the host so far."""

    def __init__(self, streams: Streams) -> None:
        _register()
        super().__init__()
        self.streams = streams
        self._refuses = False
        self.num_waits = 0

    @contextmanager
    def refusing(self, refuses: bool = True) -> Iterator[None]:
        before, self._refuses = self._refuses, refuses
        try:
            yield
        finally:
            self._refuses = before

    def kernel(self, compute: Callable) -> Callable:
        """Wrap `compute`, a function of tensors on the CPU, as one operator of the device; its insides are hidden."""

        def call(*args: Any, **kwargs: Any) -> Any:
            held = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, DeviceTensor)]
            with _disable_current_modes():
                result = compute(*tree_map(_content, args), **tree_map(_content, kwargs))
                return tree_map(lambda value: _wrapped(value, held), result)

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
        held = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
        if name in _MOVES:
            return self._move(func, args, kwargs)
        if name == "copy_" and held:
            return self._copy(*args, **kwargs)
        if name in ("pin_memory", "_pin_memory"):
            return _pinned(args[0].clone())
        if not held:
            return self._make(func, args, kwargs)
        if name in _READS or (name in _INDEXES and _is_index_of_host(args[1])):
            self._wait(str(func))
        elif any(tensor.dim() for tensor in tensors if not isinstance(tensor, DeviceTensor)):
            raise AssertionError(f"{func} of tensors on two devices")
        result = func(*tree_map(_content, args), **tree_map(_content, kwargs))
        return tree_map(lambda value: _wrapped(value, held), result)

    def _make(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call an operator of the host, or one that makes a tensor."""
        device = kwargs.get("device")
        is_pinned = kwargs.pop("pin_memory", None)
        if device is not None and torch.device(device).type == _NAME:
            return tree_map(_on_device, func(*args, **(kwargs | {"device": "cpu"})))
        result = func(*args, **kwargs)
        return _pinned(result) if is_pinned else result

    def _move(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        given = {item.name: item.default_value for item in func._schema.arguments}
        given |= dict(zip([item.name for item in func._schema.arguments], args)) | kwargs
        source, device = given["self"], given.get("device")
        if given.get("other") is not None:
            device = given["other"].device
        goes = source.device if device is None else torch.device(device)
        dtype = given.get("dtype") or source.dtype
        if goes.type == source.device.type:
            if given.get("copy") or func.overloadpacket.__name__ == "_to_copy" or dtype != source.dtype:
                return _wrapped(_content(source).to(dtype, copy=True), [source] if source.device == DEVICE else [])
            return source
        if goes.type == _NAME:
            return self._send(source, _on_device(source.to(dtype, copy=True)), bool(given["non_blocking"]))
        if given["non_blocking"]:
            raise AssertionError("a copy to memory that is not pinned cannot be waited for: it is read too early")
        self._wait("a copy to the host")
        return source.content.to(dtype, copy=True)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if isinstance(target, DeviceTensor):
            target.content.copy_(_content(source))
            return target if isinstance(source, DeviceTensor) else self._send(source, target, non_blocking)
        assert isinstance(source, DeviceTensor)
        if not non_blocking or not _is_pinned(target):
            self._wait("a copy to the host")
            return target.copy_(source.content)
        value = source.content.clone()
        target.copy_(_garbage(target))
        self.streams.current.enqueue(lambda: target.copy_(value))
        return target

    def _send(self, source: torch.Tensor, sent: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        if not source.numel() or not source.dim():
            return sent
        if not non_blocking or not _is_pinned(source):
            self._wait("a copy from pageable memory to the device")
            return sent
        before = source.clone()

        def read() -> None:
            if not torch.equal(source, before):
                raise RaceError("pinned memory was written while a copy from it was in flight")

        self.streams.current.enqueue(read)
        return sent

    def _wait(self, what: str) -> None:
        if self._refuses:
            raise HostWaitsError(f"the host waits for the device: {what}")
        self.num_waits += 1
        self.streams.synchronize()


@cache
def _register() -> None:
    """Register once a process, and not before it is needed: torch then has an accelerator."""
    _setup_privateuseone_for_python_backend()


def _content(value: Any) -> Any:
    return value.content if isinstance(value, DeviceTensor) else value


def _on_device(value: Any) -> Any:
    return DeviceTensor(value) if isinstance(value, torch.Tensor) else value


def _wrapped(value: Any, held: list[Any]) -> Any:
    """Wrap the result of an operator on the device; a result that is one of its arguments stays that argument."""
    same = next((tensor for tensor in held if tensor.content is value), None)
    if same is not None:
        return same
    return _on_device(value) if held else value


def _is_index_of_host(indices: Any) -> bool:
    """Tell whether indices make the host wait for the device.

    They do with a mask, whose number of rows the host needs, and with a tensor that must first go to the device.
    """
    return any(
        index.dtype in (torch.bool, torch.uint8) or (index.dim() and not isinstance(index, DeviceTensor))
        for index in indices
        if index is not None
    )


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    tensor.in_pinned_memory = True  # type: ignore[attr-defined]
    return tensor


def _is_pinned(tensor: torch.Tensor) -> bool:
    return getattr(tensor, "in_pinned_memory", False)


def _garbage(tensor: torch.Tensor) -> torch.Tensor:
    return torch.full_like(tensor, torch.nan if tensor.is_floating_point() else 85)
