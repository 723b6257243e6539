"""Bodies of the size limit, made of the elements that take the most memory and the most time."""

from __future__ import annotations

from tests.abuse.good import good_bodies, good_body
from tests.abuse.registry import OPEN, attack
from tests.abuse.schema import filled, is_list
from tests.abuse.server import Victim

LIMIT = 64 << 20
SMALL = 2 << 20
ELEMENTS = (b'""', b"{}", b"[]", b"null", b"-1", b"[[]]", b'{"":[]}', b"1e999")
LARGEST = (
    ("/generate", "input_ids", b'""'),
    ("/generate", "input_ids", b"[]"),
    ("/generate", "text", b'""'),
    ("/generate", "sampling_params", b"{}"),
    ("/v1/chat/completions", "messages", b"{}"),
    ("/v1/completions", "prompt", b"[]"),
    ("/detokenize", "tokens", b'""'),
    ("/abort_request", "rid", b'""'),
    ("/begin_weight_update", "manifest", b"{}"),
    ("/update_weights_from_distributed", "shapes", b"[]"),
    ("/update_weights_from_tensor", "serialized_named_tensors", b'""'),
    ("/eplb_rebalance", "physical_to_logical_map", b"[]"),
)


@attack(OPEN, seconds=200.0, keeps_mb=300, peak_mb=1000)
def lists_of_worst_elements(victim: Victim) -> str:
    """Fill every list of every body with two megabytes: the server answers in time and without much memory."""
    bodies = good_bodies(victim)
    calls = 0
    for one in victim.operations:
        if one.method != "POST":
            continue
        for name in (name for name, schema in one.fields.items() if is_list(schema)):
            for element in ELEMENTS:
                content = filled(good_body(bodies, one), name, element, SMALL)
                victim.call("POST", one.path, content=content, timeout=30.0)
                calls += 1
    return f"{calls} bodies of 2 MB"


@attack(OPEN, seconds=200.0, keeps_mb=300, peak_mb=2200)
def bodies_of_the_size_limit(victim: Victim) -> str:
    """Fill lists with 64 MiB, one body at a time: the server stays under its memory limit and answers others."""
    bodies = good_bodies(victim)
    paths = {one.path: one for one in victim.operations if one.method == "POST"}
    for path, name, element in LARGEST:
        content = filled(good_body(bodies, paths[path]), name, element, LIMIT)
        response = victim.call("POST", path, content=content, timeout=60.0)
        if response is not None and path != "/abort_request" and response.status_code not in (400, 413):
            victim.complain(f"{path} with {name} of {element.decode()}: {response.status_code}")
    victim.call("POST", "/generate", content=b"[" * LIMIT, timeout=60.0)
    victim.call("POST", "/generate", content=b'{"a":' * (LIMIT // 5), timeout=60.0)
    over = victim.call("POST", "/generate", content=b'{"text": "' + b"x" * LIMIT + b'"}', timeout=60.0)
    if over is not None and over.status_code != 413:
        victim.complain(f"a body over the limit: {over.status_code}")
    return f"{len(LARGEST) + 3} bodies of 64 MiB"
