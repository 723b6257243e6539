"""Good bodies with every structured field filled, by path: what mutations start from.

A structured field may hold an object, a list or anything.  `unseeded` names the ones of a server that no seed fills.
"""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import numpy as np

from rollout.http.responses.protocol import SEALED
from tests.abuse.good import good_bodies, payload, tensors_of
from tests.abuse.schema import Body, Operation, plain
from tests.abuse.server import Victim

EXCLUDED = {"/areal_init_weights_update_group", "/init_weights_update_group", "/init_weight_transfer_engine"}
"""They wait for a trainer until their deadline.  One body in `SELDOM` is theirs."""
SELDOM = 200
PROMPT = [5, 6, 7, 8]
AREAL_ADAPTER = {
    "lora_name": "a",
    "lora_int_id": 1,
    "lora_target_modules": ["q_proj"],
    "lora_rank": 2,
    "lora_alpha": 4,
    "lora_bias": "none",
    "base_model_name": "m",
    "group_name": "g",
}
MEMORY = {"process": 1, "descriptor": 3, "inode": 1, "num_bytes": 4096, "filled": 0}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer", "enum": [1, 2]}},
                "required": ["city"],
            },
        },
    }
]
MESSAGES = [
    {"role": "system", "content": "Answer."},
    {"role": "user", "content": [{"type": "text", "text": "What is the weather in Rome?"}], "name": "ada"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "I look.",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
        ],
    },
    {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
]
TEMPLATE_KWARGS = {"enable_thinking": False, "documents": [{"title": "a", "text": "b"}]}
NATIVE_PARAMS = {
    "max_new_tokens": 3, "min_new_tokens": 1, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01,
    "stop": ["END", "\n\n"], "stop_token_ids": [9], "logit_bias": {"5": 1.5, "6": -100}, "frequency_penalty": 0.1,
    "presence_penalty": 0.1, "repetition_penalty": 1.1, "n": 2, "sampling_seed": 7, "ignore_eos": False,
    "allowed_token_ids": [5, 6], "bad_words": ["a"],
}  # fmt: skip
VLLM_PARAMS = {
    "max_tokens": 3, "min_tokens": 1, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "n": 2, "stop": ["END"],
    "stop_token_ids": [9], "logit_bias": {"5": 1.5}, "logprobs": 2, "prompt_logprobs": 1, "seed": 7,
    "repetition_penalty": 1.1,
}  # fmt: skip
OPENAI = {
    "model": "default", "max_tokens": 3, "temperature": 0.7, "n": 2, "stop": ["END"], "stop_token_ids": [9],
    "logit_bias": {"5": 1.5}, "response_format": {"type": "text"}, "seed": 7,
}  # fmt: skip
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))
RERANKS = ("/rerank", "/v1/rerank", "/v2/rerank")
RERANK_BODIES = [
    {"query": "a", "documents": ["b", "c"], "top_n": 1},
    {"query": "a", "documents": [[{"type": "text", "text": "b"}], {"text": "c"}], "answer_format": "list"},
]
MESSAGES_BODY: dict[str, Any] = {
    "max_tokens": 3, "system": [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "t", "signature": ""},
            {"type": "tool_use", "id": "1", "name": "f", "input": {"x": [1, {"y": None}]}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "r"}]},
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "stop_sequences": ["END"],
    "thinking": {"type": "enabled", "budget_tokens": 9}, "output_config": {"effort": "low"},
    "chat_template_kwargs": TEMPLATE_KWARGS, "input_ids": None, "return_token_record": True,
    "logit_bias": {"5": 1.5}, "stop": ["x"], "stop_token_ids": [9],
}  # fmt: skip
RESPONSES_BODY: dict[str, Any] = {
    "max_output_tokens": 3, "instructions": "S", "store": True, "return_token_record": True, "include": [SEALED],
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "aGk="},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "r"},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}], "tool_choice": "auto",
    "reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}}, "metadata": {"a": "b"},
    "chat_template_kwargs": TEMPLATE_KWARGS, "logit_bias": {"5": 1.5}, "stop": ["x"], "stop_token_ids": [9],
}  # fmt: skip
GRAMMARS: list[Any] = [
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"choice": ["a", "b"]}},
    {"json_schema": SCHEMA, "bad_words": ["a"]},
    {"guided_json": SCHEMA, "allowed_token_ids": [5, 6]},
    {"guided_choice": ["a", "b"]},
    {"structural_tag": {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}},
]
"""One request has one of them."""
GENERATED = {"request_id": "r", "choices": [{"index": 0, "token_ids": PROMPT, "finish_reason": "stop", "logprobs": {}}]}


def seeds(victim: Victim) -> dict[str, list[Body]]:
    """Return good bodies for each path that takes one: the one of `tests.abuse`, and the rich ones defined here."""
    found = {one.path: [good] for one in victim.operations if (good := _good(victim, one)) is not None}
    for path, bodies in _rich(victim).items():
        if path in found:
            found[path] += bodies
    for body in found["/start_profile"]:
        body.pop("output_dir", None)  # a mutation would make folders next to it
    return found


def structured(one: Operation) -> list[str]:
    """Return the fields that may hold an object, a list or anything."""
    return [name for name, schema in one.fields.items() if any(map(_is_structured, schema.get("anyOf", [schema])))]


def unseeded(victim: Victim, bodies: dict[str, list[Body]]) -> list[str]:
    """Return the structured fields that no good body of their path fills, as "PATH FIELD"."""
    return [
        f"{one.path} {name}"
        for one in victim.operations
        for name in structured(one)
        if not any(body.get(name) is not None for body in bodies.get(one.path, []))
    ]


def _is_structured(arm: dict[str, Any]) -> bool:
    return not {"type", "$ref", "enum", "const"} & arm.keys() or arm.get("type") in ("object", "array")


def _good(victim: Victim, one: Operation) -> Body | None:
    return (good_bodies(victim).get(one.path) or plain(one.schema)) if one.schema else None


def _rich(victim: Victim) -> dict[str, list[Body]]:
    native = [
        {"input_ids": [PROMPT, PROMPT], "sampling_params": [NATIVE_PARAMS, NATIVE_PARAMS], "rid": ["a", "b"],
         "return_logprob": [True, False], "logprob_start_len": [0, 1], "top_logprobs_num": [2, 0],
         "token_ids_logprob": [[1, 2], None], "return_sampling_mask": [True, False],
         "lora_path": [None, None]},
        {"text": ["hello", "END"], "sampling_params": NATIVE_PARAMS, "stream": True, "return_routed_experts": True},
        {"input_ids": [PROMPT, PROMPT], "sampling_params": {"max_new_tokens": 2}, "return_hidden_states": [True, False],
         "hidden_state_layers": [0, 1, -1], "hidden_states_start_len": 2, "hidden_states_format": "compact",
         "lora_path": [None, None]},
        {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 9}, "prior_output_tokens": 2, "rid": "a",
         "stream": True, "stream_format": "incremental", "resumable": True, "return_routed_experts": True},
        {"input_ids": [PROMPT, PROMPT], "sampling_params": {"max_new_tokens": 9}, "prior_output_tokens": [1, 2]},
        *({"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2} | grammar} for grammar in GRAMMARS),
        *({"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}, "replay_routed_experts": routes}
          for routes in _replays(victim)),
    ]  # fmt: skip
    tensors = dict(sorted(tensors_of(victim.model).items())[:2])
    names, shapes = list(tensors), [list(tensor.shape) for tensor in tensors.values()]
    kinds = ["float32"] * len(names)
    boxes = [[[0, size] for size in shape] for shape in shapes]
    lists = {"names": names, "dtypes": kinds, "shapes": shapes}
    manifest = [{"name": name, "dtype": "float32", "shape": shape} for name, shape in zip(names, shapes)]
    tokens = {"token_ids": PROMPT, "stream_options": {"include_usage": True}, "kv_transfer_params": {"a": [1]}}
    chat = OPENAI | {
        "messages": MESSAGES, "tools": TOOLS, "tool_choice": "auto", "chat_template_kwargs": TEMPLATE_KWARGS,
        "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    tokenize = {"messages": MESSAGES, "tools": TOOLS, "chat_template_kwargs": TEMPLATE_KWARGS}
    update = {"names": names, "dtype_names": kinds, "shapes": shapes}
    experts = _experts(victim)
    moved = {"physical_to_logical_map": experts, "split": [[1.0] * len(row) for row in experts]}
    return {
        "/generate": native,
        "/generate/resume": [{"rid": "a", "from_token": 0}, {"rid": "a", "from_token": [0, 1]}],
        "/v1/completions": [
            OPENAI | {"prompt": ["a", "b"], "logprobs": 2, "echo": True},
            OPENAI | {"prompt": [PROMPT, PROMPT], "stream": True, "stream_options": {"include_usage": True}},
            *(OPENAI | {"prompt": "a"} | grammar for grammar in GRAMMARS),
        ],
        "/v1/chat/completions": [
            chat,
            chat | {"stream": True, "stream_options": {"include_usage": True}},
            OPENAI | {"messages": [], "input_ids": PROMPT},
            chat | {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
            *(OPENAI | {"messages": [], "input_ids": PROMPT} | grammar for grammar in GRAMMARS),
        ],
        "/v1/messages": [
            MESSAGES_BODY,
            MESSAGES_BODY | {"stream": True},
            {"max_tokens": 3, "input_ids": PROMPT},
            {"max_tokens": 3, "input_ids": PROMPT, "output_format": {"type": "json_schema", "schema": SCHEMA}},
            *({"max_tokens": 3, "input_ids": PROMPT} | grammar for grammar in GRAMMARS),
        ],
        "/v1/messages/count_tokens": [MESSAGES_BODY, {"input_ids": PROMPT, "output_format": {"type": "json_schema"}}],
        "/v1/responses": [
            RESPONSES_BODY,
            RESPONSES_BODY | {"stream": True},
            {"input_ids": PROMPT, "input": "a"},
            *({"input_ids": PROMPT, "input": "a"} | grammar for grammar in GRAMMARS),
        ],
        "/v1/chat/completions/render": [
            chat | {"stream_options": {"include_usage": True}},
            OPENAI | {"messages": [], "input_ids": PROMPT},
            *(OPENAI | {"messages": [], "input_ids": PROMPT} | grammar for grammar in GRAMMARS),
        ],
        "/v1/completions/render": [
            *(OPENAI | {"prompt": "a"} | grammar for grammar in GRAMMARS),
            OPENAI | {"prompt": ["a", "b"], "logprobs": 2, "stream_options": {"include_usage": True}},
        ],
        "/v1/chat/completions/derender": [
            {"generate_response": GENERATED, "chat_request": chat, "prompt_token_ids": PROMPT},
            {"stream": True, "generate_chunk": GENERATED, "stream_state": {"token_ids": {"0": [5]}}},
        ],
        "/v1/completions/derender": [
            {"generate_responses": [GENERATED], "completion_request": OPENAI | {"prompt": "a"}, "prompt_tokens": [1]},
            {"stream": True, "generate_chunk": GENERATED, "stream_state": {"token_ids": {"0": [5]}}},
        ],
        **{
            path: [tokens | {"sampling_params": VLLM_PARAMS | grammar} for grammar in ({}, *GRAMMARS)]
            for path in ("/inference/v1/generate", "/skyrl/v1/generate")
        },
        **_score_seeds(),
        **{path: [tokenize, {"prompt": ["a", "b"]}] for path in ("/tokenize", "/v1/tokenize")},
        **{path: [{"tokens": [PROMPT, PROMPT]}] for path in ("/detokenize", "/v1/detokenize")},
        "/release_memory_occupation": [{"tags": ["kv_cache", "weights"]}],
        "/resume_memory_occupation": [{"tags": ["kv_cache", "weights"]}],
        "/start_profile": [{"num_steps": 1, "activities": ["CPU"]}],
        "/begin_weight_update": [
            {"weight_version": "v", "lease_s": 2.0, "manifest": manifest},
            {"target": {"adapter": "a", "config": {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}}},
            {"target": {"draft": True}},
            {"sync_base": False},
            {"target": {"adapter": "a", "config": {"peft_type": "LORA", "r": 2}, "aliases": {names[0]: names[-1]}}},
            {"adapters": [{"adapter": "a", "config": {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}}]},
            {"manifest": {"names": names, "dtypes": kinds, "shapes": shapes, "fingerprints": "0" * 16 * len(names)}},
        ],
        "/weight_parts": [lists],
        **{
            path: [{"rank_ports": [1, 2]}, {"memory": MEMORY}]
            for path in EXCLUDED
            if path != "/init_weight_transfer_engine"
        },
        "/update_weights_from_tensor": [{"serialized_named_tensors": [payload(tensors)], "format": "safetensors"}],
        **{
            path: [
                lists,
                lists | {"boxes": boxes, "tensors_per_rank": [len(names)]},
                lists | {"memory": MEMORY},
                lists
                | {"whole_update": {"coverage": "full", "fingerprints": "0" * 16 * len(names), "prepared_s": 0.1}},
            ]
            for path in ("/update_weights_from_distributed", "/areal_set_update_weight_meta")
        },
        "/load_lora_adapter_from_tensors": [
            {"lora_name": "a", "config_dict": {"peft_type": "LORA", "r": 2}, "serialized_tensors": [payload(tensors)]}
            | {"expected_checksums": dict.fromkeys(names, "0" * 64), "upsert": True}
        ],
        "/load_lora_adapter_from_distributed": [
            lists | {"lora_name": "a", "config_dict": {"peft_type": "LORA", "r": 2}, "upsert": True}
        ],
        "/register_lora_adapter": [
            {"lora_name": "a", "config_dict": {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}}
            | {"pinned": True, "lora_path": "a", "defer_publish": True}
        ],
        "/end_weight_update": [
            {"expected_lora_checksums": {"a": dict.fromkeys(names, "0" * 64)}},
            {"abort": True, "phase": "verify"},
        ],
        **{
            path: [lists | AREAL_ADAPTER]
            for path in ("/areal_set_update_weight_meta_lora", "/areal_update_weights_lora_xccl")
        },
        "/weight_checker": [{"action": "compare", "baseline": dict.fromkeys(names, "0" * 16)}],
        "/weights_checker": [{"action": "checksum", "skip_tensor_list": names}],
        "/eplb_rebalance": [{"dry_run": True} | moved],
        "/abort_request": [{"rid": ["a", "b"]}],
        "/abort_requests": [{"request_ids": ["a", "b"]}],
        "/update_weights": [{"update_info": update}],
        "/collective_rpc": [
            {"method": "update_weights", "args": [update], "kwargs": {"update_info": update}},
            {"method": "update_weights_nccl", "args": [update]},
            {"method": "update_weights_nccl", "kwargs": {"update_info": update}},
            {"method": "update_weights_from_ipc", "args": [{"cpu": "ipc:///dev/null"}], "kwargs": {"timeout": 1}},
        ],
        "/dashboard/route_probe": [{"input_ids": PROMPT}],
        "/dashboard/trainer_metrics": [{"values": {"kl": 0.1, "reward": 1}, "step": 3}],
    }


def _score_seeds() -> dict[str, list[Body]]:
    """Return bodies of the doors that pool: label tokens are scored, and what needs a classifier is refused."""
    ids = {"text": ["a", "b"]}, {"input_ids": [PROMPT, PROMPT]}
    labels = {"query": "a", "items": ["b", "c"], "label_token_ids": [5, 6], "apply_softmax": True}
    pairs = [{one: ["a", "b"], two: ["c", "d"]} for one, two in PAIRS]
    return {
        "/v1/embeddings": [{"input": ["a", "b"], "dimensions": 4}, {"input": [PROMPT], "encoding_format": "base64"}],
        "/pooling": [{"input": [PROMPT, PROMPT], "task": "token_embed"}],
        "/encode": [*ids],
        **{path: [{"input": ["a"]}, *ids] for path in ("/classify", "/v1/classify")},
        **{path: [labels, *pairs] for path in ("/score", "/v1/score")},
        **dict.fromkeys(RERANKS, RERANK_BODIES),
    }


def _replays(victim: Victim) -> list[Any]:
    """Return right routes of two tokens in each form that a client may send."""
    shape = _route_shape(victim)
    ids = np.zeros((2, *shape), dtype=np.int32)
    ids[...] = np.arange(shape[1])
    data = base64.b64encode(ids.astype(np.uint8).tobytes()).decode()
    envelope = {"dtype": "uint8", "shape": [2, *shape], "data": data, "start": 0}
    buffer = io.BytesIO()
    np.save(buffer, ids)
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}, "return_routed_experts": True}
    compact = victim.right("POST", "/generate", body | {"routed_experts_format": "compact"}).json()
    return [
        envelope,
        base64.b64encode(ids.tobytes()).decode(),
        base64.b64encode(buffer.getvalue()).decode(),
        compact["meta_info"]["routed_experts"],
        [envelope],
    ]


def _route_shape(victim: Victim) -> tuple[int, int]:
    """Return hidden layers and top-k of the model under attack."""
    config = json.loads((victim.model / "config.json").read_text())
    return config["num_hidden_layers"], config["num_experts_per_tok"]


def _experts(victim: Victim) -> list[list[int]]:
    """Return the trivial map of physical experts, layer by layer."""
    config = json.loads((victim.model / "config.json").read_text())
    return [list(range(config["num_experts"]))] * config["num_hidden_layers"]
