"""The command line of `lockstep eplb-plan`: read without the libraries that plan."""

from __future__ import annotations

from pathlib import Path

from eplb.algorithms import TARGET
from eplb.algorithms.registry import PLANNERS
from rollout.core.args.parser import Parser

COUNTS, MAP, SPLIT = "logical_count", "physical_to_logical_map", "split"


def parser() -> Parser:
    """Return the parser of `lockstep eplb-plan`."""
    parser = Parser(prog="lockstep eplb-plan", description="Plan a placement of experts offline.")
    add = parser.add_argument
    add("dump", metavar="FILE", nargs="?", help=f"JSON or safetensors with {COUNTS} [L, E] or [steps, L, E]")
    add("--synthetic", metavar="LOADS", help="zipf:EXPONENT or lognormal:SIGMA instead of a file")
    add("--layers", type=int, default=58, help="MoE layers of synthetic loads (default: 58)")
    add("--experts", type=int, default=256, help="logical experts of synthetic loads (default: 256)")
    add("--drift", type=float, help="drift of synthetic loads since their balanced placement")
    add("--seed", type=int, default=0, help="seed of synthetic loads (default: 0)")
    add("--ranks", type=int, required=True)
    add("--nodes", type=int, default=1, help="nodes that hold the ranks (default: 1)")
    add("--groups", type=int, default=1, help="expert groups of the router (default: 1)")
    add("--redundant", type=int, default=0, help="slots beyond one for each logical expert (default: 0)")
    add("--current", metavar="FILE", help=f"JSON or safetensors with the {MAP} [L, P] in force")
    add("--algorithm", default="auto", help=f"{', '.join(PLANNERS)} (default: auto)")
    add("--target", type=float, default=TARGET, help=f"target balancedness of min_move (default: {TARGET})")
    add("--refresh", action="store_true", help="plan for a full weight refresh, which writes every slot")
    add("--expert-bytes", type=float, default=44e6, help="bytes of the weights of one expert (default: 44e6)")
    add("--bandwidth", type=float, default=50.0, help="GB/s that a rank receives (default: 50)")
    add("--svg", type=Path, help="write a picture of the load of each rank and layer")
    add("--output", type=Path, help=f"write {MAP} and {SPLIT} as JSON")
    add("--json", action="store_true", help="print the report as JSON")
    return parser
