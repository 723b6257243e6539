"""`make bench`: everything, or the parts named.

Results are tables; `--json FILE` writes them as JSON lines too.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from rich.console import Console

from benchmarks import (
    adapter_decode,
    adapter_refresh,
    adapter_slots,
    adapter_times,
    capture,
    delta,
    drafts,
    embeddings,
    eplb_planners,
    families,
    fingerprint,
    front,
    grammar,
    grpo,
    http_lists,
    memory,
    parallel,
    parallel_stalls,
    refresh_costs,
    scaling,
    scoring,
    sender_costs,
    sessions,
    spans,
    stored_costs,
    throughput,
    weight_formats,
    weight_refresh,
)
from examples.make_checkpoint.spec import FAMILIES

PARTS = (
    "throughput",
    "families",
    "formats",
    "grpo",
    "grammar",
    "drafts",
    "capture",
    "scoring",
    "embeddings",
    "front",
    "sessions",
    "scaling",
    "memory",
    "refresh",
    "delta",
    "adapters",
    "adapter-times",
    "fingerprint",
    "spans",
    "planners",
    "parallel",
    "stalls",
)
FINGERPRINT_BYTES = 512 << 20
SPANS_BYTES = 64 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--shapes", choices=("S", "M"), nargs="+", default=["S", "M"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--svg", type=Path, default=None, help="folder for the pictures of `scaling` and `parallel`")
    parser.add_argument("--against", type=Path, default=None, help="a checkout to compare with in `grpo`, `refresh`")
    parser.add_argument("--prompts", type=int, default=None, help="prompts of `grpo`; default: 32 for shape S, 4 for M")
    parser.add_argument(
        "--families", choices=FAMILIES, nargs="+", default=FAMILIES, help="families to measure in `families`"
    )
    parser.add_argument(
        "--markdown", type=Path, default=None, help="folder for the tables of `families`, `adapter-times`"
    )
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    console = Console()
    rows: list[dict] = []
    for shape in args.shapes:
        if "throughput" in args.only:
            rows += throughput.run(shape, args.batches, args.rounds, args.new_tokens, console)
        if "families" in args.only:
            batches = [batch for batch in args.batches if batch <= 32]
            measured = families.run(shape, args.families, batches, args.rounds, args.new_tokens, console)
            rows += measured
            if args.markdown is not None:
                args.markdown.mkdir(parents=True, exist_ok=True)
                (args.markdown / f"families_{shape}.md").write_text(families.markdown(measured))
        if "formats" in args.only:
            batches = [batch for batch in args.batches if batch <= 32]
            rows += weight_formats.run(shape, batches, args.rounds, args.new_tokens, console)
        if "grpo" in args.only:
            rows += grpo.run(shape, args.rounds, console, args.against, args.prompts)
        if "grammar" in args.only:
            rows += grammar.run(shape, args.rounds, args.new_tokens, console)
        if "drafts" in args.only:
            rows += drafts.run(shape, args.batches, args.rounds, args.new_tokens, console)
        if "capture" in args.only:
            rounds = args.rounds * (5 if shape == "S" else 1)
            rows += capture.run(shape, 32, rounds, args.new_tokens, console)
        if "scoring" in args.only and shape == "S":
            rows += scoring.run(shape, args.rounds, console)
        if "embeddings" in args.only:
            rows += embeddings.run(shape, args.rounds, console)
        if "sessions" in args.only and shape == "S":
            rows += sessions.run(shape, args.rounds * 4, console)
        if "scaling" in args.only:
            svg = None if args.svg is None else args.svg / f"scaling_{shape}.svg"
            rows += scaling.run(shape, args.rounds, console, svg)
        if "parallel" in args.only:
            svg = None if args.svg is None else args.svg / f"parallel_{shape}.svg"
            rows += parallel.run(shape, args.rounds, console, svg)
        if "stalls" in args.only:
            rows += parallel_stalls.run(shape, args.rounds, console)
        if "adapters" in args.only:
            rows += adapter_decode.run(shape, args.rounds, args.new_tokens, console)
            rows += adapter_slots.run(shape, args.rounds, args.new_tokens, console)
        if "adapter-times" in args.only:
            measured = adapter_times.run(shape, args.rounds, console)
            rows += measured
            if args.markdown is not None:
                args.markdown.mkdir(parents=True, exist_ok=True)
                (args.markdown / f"adapter_times_{shape}.md").write_text(adapter_times.markdown(measured))
        if "memory" in args.only:
            rows += memory.run(shape, console)
        if "refresh" in args.only:
            rows += weight_refresh.run(shape, args.rounds, console)
            if shape == "S":
                rows += http_lists.run(args.rounds, console, against=args.against)
        if "delta" in args.only:
            rows += delta.run(delta.DEMO if shape == "S" else shape, console)  # the demo's model is the small one
    if "refresh" in args.only:
        rows += sender_costs.run(console)
        rows += refresh_costs.run(list(refresh_costs.LAYERS), args.rounds, console, against=args.against)
        rows += stored_costs.run(args.rounds, console, against=args.against)
    if "adapters" in args.only:
        rows += adapter_refresh.run(args.rounds, console)
    if "formats" in args.only:
        rows += weight_formats.mismatch(console)
    if "drafts" in args.only and drafts.REAL_MODEL.is_dir():
        rows += drafts.run(drafts.TRAINED, args.batches, args.rounds, args.new_tokens, console)
    if "front" in args.only:
        rows += front.run(front.SECONDS, console)
        rows += front.run_with_model(front.SECONDS, console)
    if "fingerprint" in args.only:
        rows += fingerprint.run(FINGERPRINT_BYTES, args.rounds, console)
    if "spans" in args.only:
        rows += spans.run(SPANS_BYTES, args.rounds, console)
    if "planners" in args.only:
        rows += eplb_planners.run(console)
    if args.json is not None:
        args.json.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
