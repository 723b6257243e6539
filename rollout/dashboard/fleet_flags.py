"""The parser of `lockstep dashboard`, which reads its words without the packages that serve the page."""

from __future__ import annotations

import argparse
import os

from rollout.core.args.addresses import objection_to_base_url
from rollout.core.args.parser import Parser

KEY_VARIABLE = "LOCKSTEP_ADMIN_API_KEY"


def parser() -> Parser:
    """Return the parser of `lockstep dashboard`."""
    found = Parser(
        prog="lockstep dashboard",
        description="Show several servers on one page. It is served to this machine alone.",
    )
    found.add_argument("urls", nargs="+", metavar="URL", type=_url, help="addresses of servers, as http://host:30000")
    found.add_argument("--port", type=_port, default=30080, help="port of the page (default: 30080)")
    found.add_argument(
        "--admin-api-key",
        default=os.environ.get(KEY_VARIABLE),
        help=f"admin key of the servers, or their API key where there is no other (default: ${KEY_VARIABLE})",
    )
    return found


def _url(text: str) -> str:
    url = text if "://" in text else f"http://{text}"
    objection = objection_to_base_url(url)
    if objection is not None:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be the address of a server: {objection}")
    return url.rstrip("/")


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"a port is a number from 1 to 65535, not {text!r}")
    return int(text)
