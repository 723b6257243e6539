"""The meeting of an engine's ranks, and the check that they were started alike.

one machine        a file in the server's private folder
several machines   a listener of rank 0; every machine states the settings that it was started with
"""

from __future__ import annotations

import dataclasses
import datetime
import json

import torch.distributed as dist

from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import StartupError
from rollout.grammar.library import PACKAGE

JOIN_TIMEOUT_S = 300.0
# Settings that may differ from machine to machine: paths, addresses, logs, and settings that only rank 0 uses.
_OWN_SETTINGS = frozenset(
    {
        "model_path",
        "tokenizer_path",
        "served_model_name",
        "host",
        "port",
        "allow_unauthenticated",
        "allowed_hosts",
        "receive_timeout",
        "node_rank",
        "base_gpu_id",
        "num_threads",
        "weight_journal_dir",
        "log_level",
        "enable_metrics",
    }
)


def open_store(rendezvous: str, rank: int, world_size: int) -> dist.Store:
    """Open the store over which ranks meet: `rendezvous` is the path of a file, or `tcp://HOST:PORT`.

    Raises `StartupError`.
    """
    timeout = datetime.timedelta(seconds=JOIN_TIMEOUT_S)
    if not rendezvous.startswith("tcp://"):
        store = dist.FileStore(rendezvous, world_size)
        store.set_timeout(timeout)
        return store
    host, _, port = rendezvous.removeprefix("tcp://").rpartition(":")
    try:
        return dist.TCPStore(host, int(port), world_size, rank == 0, timeout, wait_for_workers=False)
    except RuntimeError as error:
        reason = str(error).strip().split("\n", 1)[0][:200]
        raise StartupError(f"--dist-init-addr {host}:{port}: {reason}") from error


def check_in(store: dist.Store, args: ServerArgs, rank: int, grammars: str | None) -> None:
    """Wait for all machines of the engine; called by every rank before it joins a group.

    `grammars`: the version of the library of grammars here; None if it is not installed.

    Raises `StartupError` for settings, or versions of the library of grammars, that differ, on every machine, and for a
    rank that has checked in already.
    """
    if args.nnodes == 1:
        return
    try:
        _compare(store, args, rank, grammars)
    except dist.DistNetworkError:
        raise StartupError(
            f"machine 0 ended while machine {args.node_rank} waited for all of them "
            f"(--dist-init-addr {args.dist_init_addr}): read its output"
        ) from None


def _compare(store: dist.Store, args: ServerArgs, rank: int, grammars: str | None) -> None:
    """Raise `StartupError` as `check_in`, and `DistNetworkError` if the store's owner is gone."""
    if store.add(f"rank {rank}", 1) > 1:
        raise StartupError(f"rank {rank} is there already: give every machine a --node-rank of its own")
    mine = {name: value for name, value in args.public_dict().items() if name not in _OWN_SETTINGS}
    store.set(f"settings of machine {args.node_rank}", json.dumps({"settings": mine, "grammars": grammars}))
    for machine in range(args.nnodes):
        try:
            stated = json.loads(store.get(f"settings of machine {machine}"))
        except dist.DistNetworkError:
            raise
        except RuntimeError:
            waited = f"machine {machine} of {args.nnodes} did not come within {JOIN_TIMEOUT_S:g} s"
            raise StartupError(f"{waited} (--dist-init-addr {args.dist_init_addr})") from None
        theirs = stated["settings"]
        for item in dataclasses.fields(args):
            name = item.name
            if name in mine and theirs.get(name) != mine[name]:
                flag = "--" + name.replace("_", "-")
                mine_is, theirs_is = (
                    "not given" if value is None else value for value in (mine[name], theirs.get(name))
                )
                raise StartupError(
                    f"{flag} is {mine_is} on machine {args.node_rank} and {theirs_is} on machine {machine}: "
                    "start all machines of an engine alike"
                )
        if stated["grammars"] != grammars:
            mine_is, theirs_is = (found or "missing" for found in (grammars, stated["grammars"]))
            raise StartupError(
                f"the package {PACKAGE} is {mine_is} on machine {args.node_rank} and {theirs_is} on machine {machine}: "
                "all machines of an engine need the same one, as all restrict the tokens of a request by themselves"
            )
