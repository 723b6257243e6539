"""Bodies that are right, or would be if a trainer were there.  Attacks put extremes into them or change their order.

Contents are the tensors that the server has already, so nothing that is committed changes a weight.
"""

from __future__ import annotations

import base64
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from tests.abuse.schema import Body, Operation, plain
from tests.abuse.server import Victim
from tests.model_zoo import logical_tensors

PARAMS = {"max_new_tokens": 2, "temperature": 0.0}


@lru_cache(maxsize=2)
def tensors_of(model: Path) -> dict[str, torch.Tensor]:
    return logical_tensors(model)


def payload(tensors: dict[str, torch.Tensor]) -> str:
    """Encode tensors as safetensors in base64, as /update_weights_from_tensor takes them."""
    return base64.b64encode(save(tensors)).decode()


def good_bodies(victim: Victim) -> dict[str, Body]:
    """Return good bodies by path.  A path that is not here gets the smallest body of its schema."""
    name, tensor = sorted(tensors_of(victim.model).items())[0]
    shape = list(tensor.shape)
    nowhere = str(victim.folder / "nowhere")
    group = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    return {
        "/generate": {"input_ids": [5, 6, 7], "sampling_params": PARAMS},
        "/v1/completions": {"model": "default", "prompt": "a", "max_tokens": 2},
        "/v1/chat/completions": {"model": "default", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
        "/inference/v1/generate": {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 2}},
        "/skyrl/v1/generate": {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 2}},
        "/tokenize": {"prompt": "a"},
        "/v1/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [5]},
        "/v1/detokenize": {"tokens": [5]},
        "/abort_request": {"rid": "nobody"},
        "/begin_weight_update": {"weight_version": "v", "lease_s": 5.0},
        "/init_weights_update_group": group,
        "/update_weights_from_distributed": {"names": [name], "dtypes": ["float32"], "shapes": [shape]},
        "/update_weights_from_tensor": {"serialized_named_tensors": [payload({name: tensor})], "format": "safetensors"},
        "/update_weights_from_ipc": {"zmq_handles": {"cpu": f"ipc://{nowhere}"}},
        "/update_weights_from_disk": {"model_path": str(victim.model)},
        "/pull_weights": {"local_checkpoint_dir": nowhere, "source_dir": nowhere, "target_version": 1},
        "/update_weight_version": {"new_version": "w"},
        "/get_weights_by_name": {"name": name},
        "/init_weight_transfer_engine": {"init_info": group},
        "/fetch_weights": {"target_version": 1, "sync_dir": nowhere},
        "/update_weights": {"update_info": {"names": [name], "dtype_names": ["float32"], "shapes": [shape]}},
        "/collective_rpc": {"method": "update_weights_from_ipc", "args": [{"cpu": f"ipc://{nowhere}"}]},
        "/areal_init_weights_update_group": group,
        "/areal_set_update_weight_meta": {"names": [name], "dtypes": ["float32"], "shapes": [shape]},
        "/areal_update_weights": {"model_path": str(victim.model)},
        "/start_profile": {"output_dir": str(victim.folder), "num_steps": 2},
        "/dump_expert_distribution_record": {"path": str(victim.folder / "dump.json")},
        "/eplb_rebalance": {"dry_run": True},
        "/load_lora_adapter_from_tensors": {
            "lora_name": "a",
            "config_dict": {"peft_type": "LORA", "r": 2, "lora_alpha": 4},
            "serialized_named_tensors": [payload({name: tensor})],
        },
        "/register_lora_adapter": {
            "lora_name": "a",
            "config_dict": {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]},
        },
        "/load_lora_adapter_from_distributed": {
            "lora_name": "a",
            "config_dict": {"peft_type": "LORA", "r": 2, "lora_alpha": 4},
            "names": [name],
            "dtypes": ["float32"],
            "shapes": [shape],
        },
    }


def good_body(bodies: dict[str, Body], one: Operation) -> Any:
    """Return a body that the operation takes, or None if it takes none."""
    if not one.schema:
        return None
    return bodies.get(one.path) or plain(one.schema)
