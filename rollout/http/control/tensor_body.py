"""The bodies that carry tensors: their limits, base64, and one payload for all ranks or one for each.

POST /update_weights_from_tensor, POST /load_lora_adapter_from_tensors
"""

from __future__ import annotations

import binascii
from typing import Any

from fastapi import Request

from rollout.core.errors import BadRequest, TooLarge
from rollout.core.messages.adapters import LoadLoraAdapterFromTensorsReqInput
from rollout.core.messages.weights import UpdateWeightsFromTensorReqInput
from rollout.http.control.body import body_of, fields_of
from rollout.http.io import accepted, parse_body, parsed, read_limited

_BESIDE_PAYLOAD_BYTES = 1 << 20  # of the other fields of a body


async def read_tensor_body(
    request: Request, max_payload_bytes: int, ranks: int = 1, replicas: int = 1
) -> dict[str, Any]:
    """Return the fields of `UpdateWeightsFromTensorReqInput`, with payloads that are decoded from base64.

    `ranks`: ranks of an engine; `replicas`: engines that each take the call.  Raises `BadRequest`, and `TooLarge` for a
    payload over `max_payload_bytes`, or a body larger than one such payload for each rank needs.
    """
    data = await read_limited(request, _body_bytes(max_payload_bytes, ranks))
    return await parsed(request, data, lambda data: _fields(request, data, max_payload_bytes, ranks, replicas))


async def read_adapter_body(
    request: Request, max_payload_bytes: int, ranks: int = 1, replicas: int = 1
) -> dict[str, Any]:
    """Return the fields of `LoadLoraAdapterFromTensorsReqInput`.  Its arguments and errors: `read_tensor_body`."""

    def fields(data: bytes) -> dict[str, Any]:
        verb = LoadLoraAdapterFromTensorsReqInput
        body: Any = accepted(request, parse_body(body_of(verb), data))
        given = [texts for texts in (body.serialized_tensors, body.serialized_named_tensors) if texts is not None]
        if len(given) != 1:
            raise BadRequest("give either serialized_tensors or serialized_named_tensors")
        texts = [given[0]] if isinstance(given[0], str) else given[0]
        return fields_of(verb, body) | _payloads(texts, max_payload_bytes, ranks, replicas)

    return await parsed(request, await read_limited(request, _body_bytes(max_payload_bytes, ranks)), fields)


def _body_bytes(max_payload_bytes: int, ranks: int) -> int:
    return ranks * -(-max_payload_bytes // 3) * 4 + _BESIDE_PAYLOAD_BYTES


def _fields(request: Request, data: bytes, max_payload_bytes: int, ranks: int, replicas: int) -> dict[str, Any]:
    body: Any = accepted(request, parse_body(body_of(UpdateWeightsFromTensorReqInput), data))
    if body.format == "safetensors" and body.load_format is not None:
        raise BadRequest("load_format is for payloads of SGLang's clients, not for format 'safetensors'")
    fields = fields_of(UpdateWeightsFromTensorReqInput, body)
    if body.shm_name is not None:
        if body.format != "safetensors" or body.shm_bytes is None or body.serialized_named_tensors is not None:
            raise BadRequest("shm_name needs format 'safetensors' and shm_bytes, and no serialized_named_tensors")
        return fields
    if body.shm_bytes is not None or body.shm_unlink:
        raise BadRequest("shm_bytes and shm_unlink need shm_name")
    texts = body.serialized_named_tensors
    if texts is None:
        raise BadRequest("give serialized_named_tensors or shm_name")
    return fields | _payloads(texts, max_payload_bytes, ranks, replicas)


def _payloads(texts: list[str], max_payload_bytes: int, ranks: int, replicas: int) -> dict[str, Any]:
    """Return the fields of a verb that carry its payloads."""
    if len(texts) not in (1, ranks):
        raise BadRequest(f"serialized_named_tensors has {len(texts)} payloads; this engine has {ranks} ranks")
    once = {"serialized_once": len(texts) < ranks * replicas}
    if len(set(texts)) == 1:
        return once | {"payload": _payload(texts, 0, max_payload_bytes)}
    return once | {"payloads": [_payload(texts, rank, max_payload_bytes) for rank in range(ranks)]}


def _payload(texts: list[str], rank: int, max_payload_bytes: int) -> bytes:
    text = texts[rank]
    num_bytes = len(text) // 4 * 3 - text.endswith("=") - text.endswith("==")
    if num_bytes > max_payload_bytes:
        raise TooLarge(f"the payload has {num_bytes} bytes; --max-payload-bytes is {max_payload_bytes}")
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise BadRequest(f"serialized_named_tensors[{rank}] is not base64: {error}") from None
