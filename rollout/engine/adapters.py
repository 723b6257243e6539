"""Makes the table of adapters, and loads the ones that `--lora-paths` names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from rollout.adapters.expert_stacks import is_stack
from rollout.adapters.peft_folder import Adapter, read_adapter
from rollout.core.args.checks import MAX_LORA_RANK
from rollout.core.args.server_args import ServerArgs
from rollout.core.console import say
from rollout.core.errors import AdapterError, StartupError
from rollout.core.messages.adapters import AdaptersChanged
from rollout.core.messages.req_output import AdapterCard
from rollout.layers.lora import SlotSizes
from rollout.model.adapter_places import is_dense
from rollout.model.adapters import AdapterTable
from rollout.model.decoder import DecoderForCausalLM

DEFAULT_LORA_RANK = 16
"""The rank of a server that starts without adapters, as in vLLM."""


def load_adapters(args: ServerArgs, model: DecoderForCausalLM) -> AdapterTable:
    """Return the table of adapters, with the adapters that the settings name.

    Raises `StartupError` in one line, with the name of the adapter that cannot be served; on every rank where ranks
    read other contents, as each serves its share of one adapter.
    """
    if not args.enable_lora:
        return AdapterTable(model)
    found, name = {}, ""
    try:
        for name, folder in args.adapter_folders.items():
            found[name] = read_adapter(Path(folder))
            if found[name].rank > MAX_LORA_RANK:
                raise AdapterError(f"its rank {found[name].rank} is over {MAX_LORA_RANK}")
        rank = args.max_lora_rank or max((adapter.rank for adapter in found.values()), default=DEFAULT_LORA_RANK)
        name, wanted = "", _wanted(args.lora_targets, found.values())
        table = AdapterTable(model, SlotSizes(args.max_loras_per_batch, rank), args.names, wanted)
        _require_targets(args.lora_targets, table.places.features)
        for name, adapter in found.items():
            label = table.load(name, adapter).label
            say(f"adapter {name}: {len(adapter.modules)} modules, rank {adapter.rank}, content {label.content_digest}")
            for pattern in adapter.unmatched:
                say(f"adapter {name}: {pattern} matches none of its modules")
    except AdapterError as error:
        of = f"--lora-paths {name}={args.adapter_folders[name]}: " if name else ""
        raise StartupError(f"{of}{error}") from None
    return table


def telling_of(table: AdapterTable, send: Callable[[AdaptersChanged], None]) -> Callable[[list[AdapterCard]], None]:
    """Return the function that sends the changes of a table."""
    return lambda cards: send(AdaptersChanged(cards=cards, awaited=table.awaited))


def _wanted(targets: tuple[str, ...] | None, adapters: Iterable[Adapter]) -> Callable[[str], bool]:
    """Return which modules get memory for adapters, by name."""
    if targets is None:
        modules = [module for adapter in adapters for module in adapter.modules]
        return is_dense if all(is_dense(each) and not is_stack(each) for each in modules) else lambda _: True
    if targets == ("all",):
        return lambda _: True
    return lambda module: any(_names(target, module) for target in targets)


def _require_targets(targets: tuple[str, ...] | None, modules: Collection[str]) -> None:
    """Raise `AdapterError` for a name that belongs to no module that adapters may change."""
    for target in targets or ():
        if target != "all" and not any(_names(target, module) for module in modules):
            raise AdapterError(
                f"--lora-target-modules: the model has no module {target[:200]!r} that adapters may change"
            )


def _names(target: str, module: str) -> bool:
    return f".{module}".endswith(f".{target}")
