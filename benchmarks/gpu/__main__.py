"""`make bench-gpu`: each part in a process of its own, tables, and JSON lines.

    python -m benchmarks.gpu [--parts decode refresh] [--num-layers 48] [--out DIR] [--dry-run [--device cpu]]

A part is ended after nine and a half minutes; the next one runs all the same.  Results go to `--out`, by default
./gpu-results: bench.jsonl and PART.log.  `--num-layers`: fewer for a smaller card; 48 layers are 61 GB.  The status
is 1 if a part failed, and 2 without a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu.settings import Settings

PARTS = ("experts", "decode", "prefill", "refresh", "peers")
PART_S = 570
NO_DEVICE = 2


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--num-layers", type=int, default=48, help="layers of the model; Qwen3-30B-A3B has 48")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dry-run", action="store_true", help="use tiny sizes to try the code")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--here", action="store_true", help="run the only part in this process")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(f"make bench-gpu needs a CUDA device, and torch {torch.__version__} sees none here", file=sys.stderr)
        return NO_DEVICE
    if device.type != "cuda" and not args.dry_run:
        print(f"--device {device} needs --dry-run: its numbers would not describe a GPU", file=sys.stderr)
        return NO_DEVICE
    args.out.mkdir(parents=True, exist_ok=True)
    if args.here:
        (part,) = args.parts
        _measure(part, Settings(device, args.num_layers, args.dry_run), args.out)
        return 0
    (args.out / "bench.jsonl").unlink(missing_ok=True)
    failed = [part for part in args.parts if not _in_a_process(part, args)]
    _show(args.out)
    for part in failed:
        print(f"FAILED {part}: {args.out / part}.log ends with: {_end_of(args.out / f'{part}.log')}")
    return int(bool(failed))


def _in_a_process(part: str, args: argparse.Namespace) -> bool:
    """Run a part in a process; return whether it ended well."""
    words = [sys.executable, "-m", "benchmarks.gpu", "--here", "--parts", part, "--num-layers", str(args.num_layers)]
    words += ["--device", args.device, "--out", str(args.out)] + (["--dry-run"] if args.dry_run else [])
    variables = os.environ | {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}
    if args.dry_run and args.device == "cpu":
        variables |= {"TRITON_INTERPRET": "1"}
    with (args.out / f"{part}.log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, env=variables, start_new_session=True)
        try:
            status = process.wait(PART_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
    print(f"{part}: {'ok' if status == 0 else 'FAILED'}", flush=True)
    return status == 0


def _measure(part: str, settings: Settings, out: Path) -> None:
    """Measure a part.  Each row is written as it comes, so that it stays if the part is ended early."""
    if settings.device.type == "cuda":
        machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    else:
        machine = {"device": "cpu, a dry run", "torch": torch.__version__}
    with (out / "bench.jsonl").open("a") as lines:
        for row in import_module(f"benchmarks.gpu.{part}").run(settings):
            lines.write(json.dumps({"part": part} | machine | row) + "\n")
            lines.flush()


def _show(out: Path) -> None:
    path = out / "bench.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    console = Console() if sys.stdout.isatty() else Console(width=160)
    for part in PARTS:
        of_part = [row for row in rows if row["part"] == part]
        if of_part:
            console.print(_table(part, of_part))


def _table(part: str, rows: list[dict[str, Any]]) -> Table:
    columns = list(dict.fromkeys(key for row in rows for key in row if key not in ("part", "device", "torch")))
    table = Table(*columns, title=f"{part}: {rows[0]['device']}, torch {rows[0]['torch']}")
    for row in rows:
        table.add_row(*(_cell(row.get(column, "")) for column in columns))
    return table


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _end_of(path: Path) -> str:
    return " | ".join(path.read_text(errors="replace").strip().splitlines()[-3:])


if __name__ == "__main__":
    sys.exit(main())
