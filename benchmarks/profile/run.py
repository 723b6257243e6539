"""`lockstep bench`: the command line around `profile`, `report` and `trace`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks.profile.flags import LONG_PROMPT, parser
from benchmarks.profile.machine import Machine, measure_machine
from benchmarks.profile.profile import Profile, Profiler, Workload, decode_head_start, runs_of
from benchmarks.profile.report import as_json, machine_line, noise_line, operator_table, overview, phase_table
from benchmarks.profile.trace import write_trace
from examples.make_checkpoint.run import CheckpointSpec, make_checkpoint
from rollout.core.errors import BadRequest, LockstepError, StartupError
from rollout.core.specs.model_config import ModelConfig
from rollout.distributed.parallel import Parallel
from rollout.families.registry import load_model_config
from rollout.layers.attention_kinds import ATTENTION_LAYERS
from rollout.memory.available import available_memory_bytes
from rollout.memory.kv_pool import kv_bytes_per_token
from rollout.server.engine import Engine

DEMO_CONTEXT = 8192
SLOTS_KEPT_PER_REQUEST = 8  # more than the scheduler keeps free when it admits next to running requests


def main(argv: Sequence[str]) -> int:
    """Run the command with the words after its name; return its exit status.  A refusal is one line on stderr."""
    args = parser().parse_args(argv)
    try:
        with _model_path(args.model_path) as path:
            return _bench(args, path)
    except (LockstepError, OSError) as error:
        print(f"lockstep bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nlockstep bench: interrupted", file=sys.stderr)
        return 130


def _bench(args: argparse.Namespace, model_path: Path) -> int:
    config = load_model_config(model_path)
    if args.prefill is None:
        args.prefill = min(LONG_PROMPT, config.max_position_embeddings - 1)
    _check(args, config)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True) as progress:
        task = progress.add_task("measure the machine", total=runs_of(len(args.batch_sizes), args.prefill > 0) + 2)
        machine = measure_machine()
        progress.update(task, description="load the model", advance=1)
        engine = _engine(args, model_path, config)
        progress.advance(task)
        workload = Workload(args.input_len, args.output_len, args.temperature, config.vocab_size)
        try:
            profiler = Profiler(engine, machine, workload, lambda: progress.advance(task))
            profiles = _profiles(args, profiler, lambda what: progress.update(task, description=what))
            if args.trace is not None:
                progress.update(task, description="trace")
                write_trace(args.trace, engine, workload, args.batch_sizes, args.prefill)
        finally:
            engine.close()
    _report(args, machine, profiles)
    return 0


def _profiles(args: argparse.Namespace, profiler: Profiler, describe: Callable[[str], None]) -> list[Profile]:
    profiles = []
    for size in args.batch_sizes:
        describe(f"decode, batch {size}")
        profiles.append(profiler.decode(size))
    if args.prefill:
        describe(f"prefill of {args.prefill}")
        profiles.append(profiler.prefill(args.prefill))
    return profiles


def _engine(args: argparse.Namespace, model_path: Path, config: ModelConfig) -> Engine:
    return Engine(
        model_path=str(model_path),
        dtype=args.dtype,
        num_threads=args.threads,
        disable_native_kernels=args.disable_native_kernels,
        skip_tokenizer_init=True,
        chunked_prefill_size=args.chunked_prefill_size,
        max_total_tokens=_pool_tokens(args),
        max_running_requests=max(args.batch_sizes),
        random_seed=1,
    )


def _pool_tokens(args: argparse.Namespace) -> int:
    """Return the slots of KV for the largest run.  The cache is emptied after each run."""
    needs = [size * (_decode_tokens(args, size) + SLOTS_KEPT_PER_REQUEST) for size in args.batch_sizes]
    tokens: int = max(*needs, args.prefill + SLOTS_KEPT_PER_REQUEST)
    return tokens


def _decode_tokens(args: argparse.Namespace, batch_size: int) -> int:
    """Return the tokens of one request, prompt and output."""
    tokens: int = (
        args.input_len + args.output_len + decode_head_start(batch_size, args.input_len, args.chunked_prefill_size)
    )
    return tokens


def _check(args: argparse.Namespace, config: ModelConfig) -> None:
    """Raise before anything is measured, not after the first half."""
    longest = max([_decode_tokens(args, size) for size in args.batch_sizes] + [args.prefill + 1])
    if longest > config.max_position_embeddings:
        raise BadRequest(
            f"these lengths need a context of {longest} tokens, but the model has {config.max_position_embeddings}"
        )
    for path in (args.trace, args.json):
        if path is not None and not path.resolve().parent.is_dir():
            raise BadRequest(f"{path.parent} is not a folder")
    dtype = getattr(torch, config.torch_dtype if args.dtype == "auto" else args.dtype)
    kept = [ATTENTION_LAYERS[type(layer.attention)].kept(layer.attention, Parallel()) for layer in config.layers]
    slot = kv_bytes_per_token(kept, dtype)
    needed, available = _pool_tokens(args) * slot, available_memory_bytes()
    if needed > available:
        raise StartupError(
            f"the KV of these batches takes {needed / 1e9:.1f} GB, {available / 1e9:.1f} GB are free: "
            "give smaller --batch-sizes, --input-len or --output-len"
        )


def _report(args: argparse.Namespace, machine: Machine, profiles: list[Profile]) -> None:
    threads = torch.get_num_threads()
    console = Console()
    for profile in profiles:
        console.print(phase_table(profile))
        console.print(operator_table(profile))
    console.print(overview(profiles))
    console.print(machine_line(machine, threads))
    noise = noise_line(profiles)
    if noise is not None:
        console.print(noise)
    if args.json is not None:
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
        content: dict[str, Any] = {
            "settings": settings | {"threads": threads, "torch": torch.__version__},
            "machine": vars(machine),
            "profiles": [as_json(profile) for profile in profiles],
        }
        args.json.write_text(json.dumps(content, indent=1) + "\n")
    for path in (args.json, args.trace):
        if path is not None:
            print(f"wrote {path}", file=sys.stderr)


@contextmanager
def _model_path(given: Path | None) -> Iterator[Path]:
    """Yield the folder that was given, or a small random model that lives as long as the command."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        yield make_checkpoint(folder, CheckpointSpec(context_length=DEMO_CONTEXT))
