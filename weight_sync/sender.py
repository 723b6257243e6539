"""The trainer's side of a refresh: joins an engine's group as rank 0 and drives one transaction per weight version.

    begin (manifest with fingerprints) -> for each bucket: control call in a thread + broadcast here -> end
                                              any failure -> abort, and the failure is raised

Needs torch only.  The engine is reached through `EngineControl`, which an HTTP client satisfies.
Knows tensors by their checkpoint names.  Does not know HTTP, training or sharding.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from weight_sync.bucket import pack, plan_buckets
from weight_sync.errors import TransactionStateError, TransportError, WeightRequestError
from weight_sync.fingerprint import digest, fingerprint, fingerprint_hex
from weight_sync.process_group import GroupHandle, free_port, init_process_group, resolve_backend
from weight_sync.receivers.distributed import FLATTENED_BUCKET
from weight_sync.tensor_meta import TensorMeta, dtype_name

NamedTensors = list[tuple[str, torch.Tensor]]

_POLL_S = 0.002
_GRACE_S = 2.0
_SETTLE_S = 0.5


class EngineControl(Protocol):
    """The engine's control calls, named as its HTTP endpoints.  Each returns the reply and raises on a refusal."""

    def init_weights_update_group(
        self,
        *,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str | None,
    ) -> Mapping[str, Any]: ...

    def destroy_weights_update_group(self, *, group_name: str) -> Mapping[str, Any]: ...

    def begin_weight_update(
        self, *, weight_version: str | None, coverage: str, manifest: list[dict[str, Any]] | None
    ) -> Mapping[str, Any]: ...

    def update_weights_from_distributed(
        self,
        *,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group_name: str,
        load_format: str | None,
        weight_version: str | None,
    ) -> Mapping[str, Any]: ...

    def end_weight_update(self) -> Mapping[str, Any]: ...

    def abort_weight_update(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class RefreshReport:
    """What was sent.  Compare `fingerprints` and `digest` with the engine's to prove what it loaded."""

    weight_version: str | None
    num_bytes: int
    seconds: float
    num_buckets: int
    fingerprints: dict[str, str]  # 16 hex digits by name; empty without a manifest
    digest: str | None


def named_tensors_of(
    source: torch.nn.Module | Mapping[str, torch.Tensor], dtype: torch.dtype | None = None
) -> NamedTensors:
    """The tensors of a model or state dict by checkpoint name, each content once.

    Of tensors that share their memory (tied embeddings) only the first is kept.  `dtype`: the engine's; floating-point
    tensors are cast to it, which copies them; without it the tensors are the model's own.
    """
    state = source.state_dict() if isinstance(source, torch.nn.Module) else source
    named: NamedTensors = []
    seen: set[tuple[Any, ...]] = set()
    for name, tensor in state.items():
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        cast = dtype is not None and tensor.is_floating_point()
        named.append((name, tensor.detach().to(dtype) if cast else tensor.detach()))
    return named


def split_fused_experts(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> NamedTensors:
    """Fused expert tensors of transformers 5 as per-expert checkpoint tensors; everything else as it is.

    `*.experts.gate_up_proj` [E, 2I, D] gives `*.experts.{e}.gate_proj.weight` (first I rows) and `.up_proj.weight`;
    `*.experts.down_proj` [E, D, I] gives `*.experts.{e}.down_proj.weight`.  The results are views.
    """
    named: NamedTensors = []
    for name, tensor in named_tensors:
        prefix, _, kind = name.rpartition(".")
        if not prefix.endswith("experts") or kind not in ("gate_up_proj", "down_proj"):
            named.append((name, tensor))
            continue
        if tensor.dim() != 3 or (kind == "gate_up_proj" and tensor.shape[1] % 2):
            raise WeightRequestError(f"{name}: not a fused expert tensor, shape {list(tensor.shape)}")
        for logical_expert, matrix in enumerate(tensor):
            if kind == "down_proj":
                named.append((f"{prefix}.{logical_expert}.down_proj.weight", matrix))
                continue
            gate, up = matrix.chunk(2)
            named.append((f"{prefix}.{logical_expert}.gate_proj.weight", gate))
            named.append((f"{prefix}.{logical_expert}.up_proj.weight", up))
    return named


class WeightSender:
    """Refreshes one engine.  Not thread-safe.  `timeout_s`: deadline of the rendezvous and of each bucket."""

    def __init__(self, control: EngineControl, *, timeout_s: float = 300.0) -> None:
        self._control = control
        self._timeout_s = timeout_s
        self._group: GroupHandle | None = None
        self._device = torch.device("cpu")

    def connect(
        self,
        *,
        master_address: str = "127.0.0.1",
        master_port: int | None = None,
        engine_world_size: int = 1,
        group_name: str = "weight_update_group",
        backend: str | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Join a group with the engine: this process is rank 0, the engine's ranks follow.

        `master_address`: where the engine reaches this process.  `master_port` None: a free one.  `device`: where the
        tensors to send live; decides the backend where None is given.
        Raises what the engine refused, else `TransportError` or `WeightRequestError`.
        """
        if self._group is not None:
            raise TransactionStateError("connected already; close first")
        port = free_port() if master_port is None else master_port
        resolved = resolve_backend(backend, device)
        world_size = 1 + engine_world_size
        call = _in_thread(
            self._control.init_weights_update_group,
            master_address=master_address,
            master_port=port,
            rank_offset=1,
            world_size=world_size,
            group_name=group_name,
            backend=resolved,
        )
        joining = _in_thread(
            init_process_group, master_address, port, 0, world_size, group_name, resolved, self._timeout_s
        )
        wait([call, joining], timeout=self._timeout_s + _GRACE_S, return_when=FIRST_EXCEPTION)
        refusal = _refusal(call)
        if refusal is not None or not joining.done():
            joining.add_done_callback(_leave_late)  # it ends at its own deadline
            raise refusal or TransportError(f"the engine did not join within {self._timeout_s:g} s")
        group = joining.result()
        if not call.done():
            group.destroy()
            raise TransportError(f"the engine joined, but did not answer within {self._timeout_s:g} s")
        self._group = group
        self._device = torch.device("cpu" if resolved == "gloo" else device)

    def refresh(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        weight_version: str | None = None,
        *,
        coverage: str = "full",
        bucket_bytes: int = 256 << 20,
        progress: Callable[[int, int], None] | None = None,
        with_manifest: bool = True,
        split_experts: bool = True,
    ) -> RefreshReport:
        """Send one weight version as one transaction; returns when the engine has committed it.

        `named_tensors`: in the engine's dtype (see `named_tensors_of`), any device; they must not change meanwhile.
        `progress(bytes done, bytes in all)` is called after each bucket.  `with_manifest`: state names, dtypes, shapes
        and fingerprints first, so that a wrong refresh is refused before anything is sent and a flipped bit is noticed.
        `split_experts`: see `split_fused_experts`; without it fused tensors go as they are, with no fingerprint.

        Raises what the engine refused or `TransportError`.  If `begin` was accepted and `end` not yet asked for, the
        engine's transaction has been aborted by then; if that failed too, the error carries a note that says so.
        """
        start = time.perf_counter()
        tensors = _by_name(split_fused_experts(named_tensors) if split_experts else named_tensors)
        metas = [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        fingerprints: dict[str, int] = {}
        if with_manifest:
            fingerprints = {name: fingerprint(tensor) for name, tensor in tensors.items() if not _is_fused(name)}
        manifest = [_manifest_entry(meta, fingerprints.get(meta.name)) for meta in metas] if with_manifest else None
        buckets = plan_buckets(metas, bucket_bytes)
        num_bytes = sum(meta.nbytes for meta in metas)
        if self._group is None:
            raise TransactionStateError("not connected; connect first")

        self._control.begin_weight_update(weight_version=weight_version, coverage=coverage, manifest=manifest)
        done = 0
        try:
            for bucket in buckets:
                self._send_bucket(self._group, bucket, tensors, weight_version)
                done += sum(meta.nbytes for meta in bucket)
                if progress is not None:
                    progress(done, num_bytes)
        except BaseException as error:
            self._abort(error)
            raise
        self._control.end_weight_update()
        complete = fingerprints.keys() == tensors.keys()
        return RefreshReport(
            weight_version,
            num_bytes,
            time.perf_counter() - start,
            len(buckets),
            {name: fingerprint_hex(value) for name, value in fingerprints.items()},
            digest((meta, fingerprints[meta.name]) for meta in metas) if complete else None,
        )

    def close(self) -> None:
        """Leave the group and have the engine leave it.  Raises what the engine refused; the group is left anyway."""
        group, self._group = self._group, None
        try:
            if group is not None:
                self._control.destroy_weights_update_group(group_name=group.name)
        finally:
            if group is not None:
                group.destroy()

    def _send_bucket(
        self,
        group: GroupHandle,
        metas: Sequence[TensorMeta],
        tensors: Mapping[str, torch.Tensor],
        weight_version: str | None,
    ) -> None:
        flat = pack([(meta.name, tensors[meta.name]) for meta in metas]).to(self._device)
        deadline = time.monotonic() + self._timeout_s
        call = _in_thread(
            self._control.update_weights_from_distributed,
            names=[meta.name for meta in metas],
            dtypes=[dtype_name(meta.dtype) for meta in metas],
            shapes=[list(meta.shape) for meta in metas],
            group_name=group.name,
            load_format=FLATTENED_BUCKET,
            weight_version=weight_version,
        )
        try:
            work = group.start_broadcast(flat)
            give_up = deadline
            while not work.is_completed() and time.monotonic() < give_up:
                if give_up == deadline and _refusal(call) is not None:
                    give_up = time.monotonic() + _SETTLE_S  # refused after it was received: soon done then
                time.sleep(_POLL_S)
            if not work.is_completed():
                raise TransportError(f"the engine did not take a bucket within {self._timeout_s:g} s")
            group.finish(work, deadline)
            wait([call], timeout=max(deadline - time.monotonic(), 0.0) + _GRACE_S)
            if not call.done():
                raise TransportError(f"the engine took a bucket, but did not answer within {self._timeout_s:g} s")
        except TransportError as error:
            wait([call], timeout=_GRACE_S)  # the engine's own reason is the better one, if it has one
            self._leave_failed(group)
            refusal = _refusal(call)
            if refusal is not None:
                raise refusal from error
            raise
        call.result()

    def _leave_failed(self, group: GroupHandle) -> None:
        """Both sides leave: a broadcast still pending here ends when the engine closes its end."""
        self._group = None
        group.broken = True
        # The engine may have left already, or be gone.
        with contextlib.suppress(Exception):
            self._control.destroy_weights_update_group(group_name=group.name)
        group.destroy()

    def _abort(self, cause: BaseException) -> None:
        try:
            self._control.abort_weight_update()
        except Exception as error:
            cause.add_note(f"aborting the weight update failed as well: {type(error).__name__}: {error}")


def _by_name(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in named_tensors:
        if name in tensors:
            raise WeightRequestError(f"{name} is given twice")
        tensors[name] = tensor.detach()
    return tensors


def _is_fused(name: str) -> bool:
    return name.endswith(("experts.gate_up_proj", "experts.down_proj"))


def _manifest_entry(meta: TensorMeta, value: int | None) -> dict[str, Any]:
    return {
        "name": meta.name,
        "dtype": dtype_name(meta.dtype),
        "shape": list(meta.shape),
        "fingerprint": None if value is None else fingerprint_hex(value),
    }


def _in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
    """Run in a daemon thread: a call that hangs can neither hold up the next one nor the end of the process."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=f"weight-sender-{function.__name__}", daemon=True).start()
    return future


def _refusal(call: Future[Any]) -> BaseException | None:
    """What a control call raised; None if it went well or still runs."""
    return call.exception() if call.done() else None


def _leave_late(joining: Future[GroupHandle]) -> None:
    if joining.exception() is None:
        joining.result().destroy()
