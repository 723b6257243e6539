"""Makes the table of adapters, and loads the ones that `--lora-paths` names."""

from __future__ import annotations

from pathlib import Path

from rollout.adapters.peft_folder import read_adapter
from rollout.core.args.checks import MAX_LORA_RANK
from rollout.core.args.server_args import ServerArgs
from rollout.core.console import say
from rollout.core.errors import AdapterError, StartupError
from rollout.layers.lora import SlotSizes
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
        table = AdapterTable(model, SlotSizes(args.max_loras_per_batch, rank), args.names)
        for name, adapter in found.items():
            label = table.load(name, adapter).label
            say(f"adapter {name}: {len(adapter.modules)} modules, rank {adapter.rank}, content {label.content_digest}")
    except AdapterError as error:
        raise StartupError(f"--lora-paths {name}={args.adapter_folders[name]}: {error}") from None
    return table
