"""The dashboard of a real server in a real browser: what its tests send and move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from tests.chromium import MISSING, PROGRAM, Browser
from tests.server_process import ServerProcess

NEEDS_BROWSER = pytest.mark.skipif(PROGRAM is None, reason=MISSING)
SETTINGS = {"max_total_tokens": 1024, "num_threads": 1, "skip_tokenizer_init": True}


def weights(model: Path, scale: float = 1.0) -> dict[str, torch.Tensor]:
    tensors = {name: tensor for file in model.glob("*.safetensors") for name, tensor in load_file(file).items()}
    generator = torch.Generator().manual_seed(7)
    for name, tensor in tensors.items():
        if scale != 1.0 and tensor.dim() == 2:
            tensors[name] = tensor + (scale - 1.0) * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
    return tensors


def begin(server: ServerProcess, version: str) -> None:
    server.client.begin_weight_update(weight_version=version, update_id=version[:64], lease_s=30.0)


def send(server: ServerProcess, version: str, tensors: dict[str, torch.Tensor]) -> None:
    server.client.update_weights_from_tensor([save(tensors)], format="safetensors", update_id=version[:64])


def generate(server: ServerProcess, **params: Any) -> None:
    body = {"input_ids": [5, 6, 7, 8], "sampling_params": {"max_new_tokens": 8, "ignore_eos": True} | params}
    server.http.post("/generate", json=body)


def enter(browser: Browser, key: str) -> None:
    browser.evaluate(
        f"document.getElementById('key-message').innerText = ''; document.getElementById('key').value = {key!r};"
        "document.getElementById('keys').requestSubmit()"
    )


def hover(page: Browser, chart: str, at: str) -> None:
    """Move the mouse over a chart, to the time of this expression."""
    move(page, "mouseMoved", *place(page, chart, at))


def place(page: Browser, chart: str, at: str) -> tuple[float, float]:
    """Return where on the window a time stands in a chart."""
    found = page.evaluate(
        f"(() => {{ const {{ plot }} = lockstep.charts.get({chart!r}); plot.root.scrollIntoView({{block: 'center'}});"
        f"const box = plot.over.getBoundingClientRect();"
        f"return [box.left + plot.valToPos({at}, 'x'), box.top + box.height / 2]; }})()"
    )
    return found[0], found[1]


def move(page: Browser, kind: str, x: float, y: float) -> None:
    page.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)
