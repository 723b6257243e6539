"""`make bench-peers`: tokens a second of Lockstep and of other CPU engines, in one interleaved run.

Every system runs the same weights in bf16, greedily, without prefix caching.  Decoding is what a run with all new
tokens takes longer than one with a single token.  Peers get environments of their own under build/peers/, made on
first use.  `--before DIR` measures against another checkout of this project instead, and wants no cell slower:

    git worktree add build/before COMMIT && python -m benchmarks.peers --before build/before
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.peers import report
from benchmarks.peers.environments import ENVIRONMENTS, InstallError, install
from benchmarks.peers.measure import run_shape
from benchmarks.peers.rates import Cell
from benchmarks.peers.systems import BEFORE, BEFORE_HTTP, OURS, OURS_HTTP, PEERS
from benchmarks.shapes import SHAPES, checkpoint

PROMPT_TOKENS = 128
PREFILL_TOKENS = 2048


def main() -> None:
    args = _parse()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    torch.set_num_threads(args.threads)
    console = Console()
    peers = tuple(args.peers) if args.before is None else (BEFORE, BEFORE_HTTP)
    missing = {} if args.before is not None else _install(peers, console)
    if args.install_only:
        sys.exit(1 if missing else 0)
    names = [OURS, OURS_HTTP, *peers]
    cells = [Cell(batch, PROMPT_TOKENS, args.new_tokens) for batch in args.batches] + [Cell(1, PREFILL_TOKENS, 1)]
    rows: list[dict] = []
    for shape in args.shapes:
        checkpoint(shape)
        run = run_shape(shape, names, missing, cells, args.rounds, args.threads, console, args.before)
        report.show(run, names, cells, peers, console)
        rows += report.rows(run, cells, peers)
        if args.json is not None:
            args.json.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--shapes", choices=tuple(SHAPES), nargs="+", default=list(SHAPES))
    parser.add_argument("--batches", type=_positive, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--peers", choices=PEERS, nargs="*", default=list(PEERS))
    parser.add_argument("--rounds", type=_positive, default=3, help="measured rounds after one warm-up")
    parser.add_argument("--new-tokens", type=_several, default=128, help="tokens decoded per prompt; at least 2")
    parser.add_argument(
        "--threads", type=_positive, default=os.cpu_count() or 1, help="compute threads of every system"
    )
    parser.add_argument("--before", type=_checkout, default=None, help="compare with another checkout instead of peers")
    parser.add_argument("--install-only", action="store_true", help="make the environments and end")
    parser.add_argument("--json", type=Path, default=None, help="file for the results, one JSON object a line")
    return parser.parse_args()


def _install(peers: tuple[str, ...], console: Console) -> dict[str, str]:
    """Install the peers; return a reason for each that could not be installed."""
    missing = {}
    for peer in peers:
        try:
            install(ENVIRONMENTS[peer], lambda line: console.print(line, highlight=False))
        except InstallError as error:
            missing[peer] = f"not installed: {error}"
            console.print(f"[bold red]{peer} is left out:[/] {missing[peer]}")
    return missing


def _positive(text: str) -> int:
    return _at_least(1, text)


def _several(text: str) -> int:
    return _at_least(2, text)


def _at_least(least: int, text: str) -> int:
    if int(text) < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
    return int(text)


def _checkout(text: str) -> Path:
    folder = Path(text).resolve()
    if not (folder / "rollout" / "server" / "engine.py").is_file():
        raise argparse.ArgumentTypeError(f"{text} is not a checkout of this project")
    return folder


def _interrupt(number: int, frame: object) -> None:
    print(f"ended by {signal.Signals(number).name}", file=sys.stderr)
    raise SystemExit(128 + number)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
