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

from benchmarks.profile.machine import Machine, measure_machine
from benchmarks.profile.profile import MIN_OUTPUT_LEN, Profile, Profiler, Workload, decode_head_start, runs_of
from benchmarks.profile.report import as_json, machine_line, noise_line, operator_table, overview, phase_table
from benchmarks.profile.trace import write_trace
from rollout.core.errors import BadRequest, LockstepError, StartupError
from rollout.core.model_config import ModelConfig
from rollout.core.server_args import DTYPES
from rollout.distributed.parallel import Parallel
from rollout.entrypoints.engine import Engine
from rollout.entrypoints.make_checkpoint import CheckpointSpec, make_checkpoint
from rollout.layers.attention_kinds import ATTENTION_LAYERS
from rollout.mem_cache.kv_pool import kv_bytes_per_token
from rollout.mem_cache.memory import available_memory_bytes
from rollout.models.registry import load_model_config

DEMO_CONTEXT = 8192
SLOTS_KEPT_PER_REQUEST = 8  # more than the scheduler keeps free when it admits beside running requests


def main(argv: Sequence[str]) -> int:
    """The command with the words after its name; its exit status.  A refusal is one line on stderr."""
    args = _parse(argv)
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
    """Slots for the largest run.  The cache is emptied after each."""
    needs = [size * (_decode_tokens(args, size) + SLOTS_KEPT_PER_REQUEST) for size in args.batch_sizes]
    return max(*needs, args.prefill + SLOTS_KEPT_PER_REQUEST)


def _decode_tokens(args: argparse.Namespace, batch_size: int) -> int:
    """Prompt and output of one request."""
    return args.input_len + args.output_len + decode_head_start(batch_size, args.input_len, args.chunked_prefill_size)


def _check(args: argparse.Namespace, config: ModelConfig) -> None:
    """Raise before anything is measured, not after the first half."""
    longest = max([_decode_tokens(args, size) for size in args.batch_sizes] + [args.prefill + 1])
    if longest > config.max_position_embeddings:
        raise BadRequest(
            f"these lengths need a context of {longest} tokens, the model has {config.max_position_embeddings}"
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
    """The folder that was given, or a small random model that lives as long as the command."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        yield make_checkpoint(folder, CheckpointSpec(context_length=DEMO_CONTEXT))


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="lockstep bench",
        description="Tokens a second, the breakdown of a step, and how far each operator is from the roofline.",
    )
    add = parser.add_argument
    add("--model-path", type=Path, help="checkpoint folder (default: a small random model, made for the occasion)")
    add("--batch-sizes", type=_count(), nargs="+", default=[1, 8, 32, 64], metavar="N", help="(default: 1 8 32 64)")
    add("--input-len", type=_count(), default=128, metavar="N", help="prompt tokens of a request (default: 128)")
    add(
        "--output-len", type=_count(MIN_OUTPUT_LEN), default=64, metavar="N",
        help=f"decode steps that are measured, at least {MIN_OUTPUT_LEN} (default: 64)",
    )  # fmt: skip
    add(
        "--prefill",
        type=_count(0),
        default=2048,
        metavar="N",
        help="tokens of one long prompt; 0: none (default: 2048)",
    )
    add("--temperature", type=_temperature, default=0.0, help="of sampling; 0 is greedy (default: 0)")
    add("--chunked-prefill-size", type=int, default=2048, help="most prompt tokens of a step (default: 2048)")
    add("--dtype", choices=DTYPES, default="auto", help="of weights and KV (default: the checkpoint's)")
    add("--threads", type=_count(), help="compute threads (default: all cores)")
    add("--disable-native-kernels", action="store_true", help="run on plain torch")
    add("--trace", type=Path, metavar="FILE", help="write a Chrome trace of a few steps")
    add("--json", type=Path, metavar="FILE", help="write all numbers")
    return parser.parse_args(argv)


def _count(least: int = 1) -> Callable[[str], int]:
    """A whole number from `least` up."""

    def parse(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}")
        return value

    return parse


def _temperature(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < float("inf"):
        raise argparse.ArgumentTypeError("must be 0 or more")
    return value
