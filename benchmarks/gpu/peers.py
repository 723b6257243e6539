"""Decode by other systems with a random model of the same shape: transformers' continuous batching, mini-sglang.

transformers stamps every token with a time, so that what is counted is the stretch in which all requests decode.
mini-sglang is measured where its package is installed (docs/gpu_offline.md), by two runs of different lengths.
"""

from __future__ import annotations

import gc
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers

from benchmarks.gpu.decode import CONTEXTS
from benchmarks.gpu.model import MEANWHILE, config_folder, driver, shape
from benchmarks.gpu.settings import Settings
from examples.make_checkpoint.tokenizer import save_tokenizer, train_tokenizer

BATCHES, NEW_TOKENS = (1, 16, 64, 256), 64
NOT_INSTALLED = "not installed: see docs/gpu_offline.md for its requirements"
Rates = Iterator[tuple[int, float]]


def run(settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield a row for each system and batch size, or one row with the reason why a system was not run."""
    systems: dict[str, Callable[[Settings], Rates]] = {
        "lockstep": _lockstep,
        "transformers": _transformers,
        "mini-sglang": _mini_sglang,
    }
    for name, measure in systems.items():
        try:
            for batch, rate in measure(settings):
                yield {"system": name, "batch": batch, "decode tokens/s": rate}
        except ImportError as error:
            yield {"system": name, "not run": str(error)}
        except Exception as error:  # another project's: its failure is a line, and the next system is measured
            if name == "lockstep":
                raise
            yield {"system": name, "not run": f"{type(error).__name__}: {error}"}
        gc.collect()
        if settings.device.type == "cuda":
            torch.cuda.empty_cache()


def _sizes(settings: Settings) -> tuple[tuple[int, ...], int]:
    return ((2,), 8) if settings.dry_run else (BATCHES, NEW_TOKENS)


def _prompts(settings: Settings, batch: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(2, shape(settings).vocab_size, (batch, CONTEXTS[0]), generator=generator).tolist()


def _lockstep(settings: Settings) -> Rates:
    batches, new_tokens = _sizes(settings)
    most, tokens = batches[-1], CONTEXTS[0] + new_tokens + MEANWHILE
    sizes = {"max_total_tokens": most * tokens, "max_running_requests": most}
    with driver(shape(settings), settings.device, dtype=settings.dtype, **sizes) as engine:
        for batch in batches:
            times = [engine.seconds_per_decode_step(batch, CONTEXTS[0], new_tokens) for _ in range(4)]
            yield batch, batch / statistics.median(times[1:])


def _transformers(settings: Settings) -> Rates:
    """Yield the rates of `generate_batch`, which itself chooses the attention and whether to use CUDA graphs."""
    batches, new_tokens = _sizes(settings)
    with config_folder(shape(settings)) as folder, settings.device:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        dtype = getattr(torch, settings.dtype)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    greedy = transformers.GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1)
    for batch in batches:
        answers = model.generate_batch(
            inputs=_prompts(settings, batch), generation_config=greedy, record_timestamps=True
        ).values()
        errors = [one.error for one in answers if one.error is not None]
        stamps = [one.timestamps for one in answers if one.timestamps]
        if errors or len(stamps) < batch:
            raise RuntimeError(f"{len(errors)} of {batch} requests failed, the first: {(errors or ['no times'])[0]}")
        begin, end = max(one[0] for one in stamps), min(one[-1] for one in stamps)
        tokens = sum(begin < stamp <= end for one in stamps for stamp in one)
        yield batch, tokens / (end - begin) if end > begin else float("nan")


def _mini_sglang(settings: Settings) -> Rates:
    """Yield the rates of mini-sglang's offline engine, which makes up its weights.

    Raises `ImportError` where it is not installed.
    """
    if importlib.util.find_spec("minisgl") is None:
        raise ImportError(NOT_INSTALLED)
    engine, params = importlib.import_module("minisgl.llm"), importlib.import_module("minisgl.core")
    batches, new_tokens = _sizes(settings)
    with config_folder(shape(settings)) as folder:
        save_tokenizer(train_tokenizer(4096), folder, 4096)
        llm = engine.LLM(str(folder), use_dummy_weight=True, attention_backend="fi", max_running_req=batches[-1])
        for batch in batches:
            seconds = []
            for length in (new_tokens, 1, new_tokens, 1):  # the first of each warms up
                wanted = params.SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=length)
                started = time.perf_counter()
                llm.generate(_prompts(settings, batch), wanted)
                seconds.append(time.perf_counter() - started)
            yield batch, batch * (new_tokens - 1) / max(seconds[2] - seconds[3], 1e-9)
