"""Sampling that goes on where an earlier request stopped: its seed, and its budget of tokens."""

from __future__ import annotations

import msgspec

from rollout.core.errors import BadRequest
from rollout.core.sampling_params import SamplingParams


def continued_params(params: SamplingParams, count: int) -> SamplingParams:
    """Return the parameters for the rest of a sample that began with `params` and has `count` tokens by now.

    Raises `BadRequest` for a sample that has all its tokens, and for parameters whose effect depends on the tokens
    before.
    """
    if count == 0:
        return params
    if params.frequency_penalty or params.presence_penalty:
        raise BadRequest(
            "frequency_penalty and presence_penalty are not supported: a resumed request cannot count earlier output"
        )
    if params.grammar is not None:
        raise BadRequest("a grammar is not supported: a resumed request would begin it anew")
    if count >= params.max_new_tokens:
        raise BadRequest(f"all {params.max_new_tokens} tokens were generated; there is nothing to resume")
    seed = params.sampling_seed
    return msgspec.structs.replace(
        params,
        max_new_tokens=params.max_new_tokens - count,
        min_new_tokens=max(params.min_new_tokens - count, 0),
        sampling_seed=None if seed is None else continued_seed(seed, count),
    )


def continued_seed(seed: int, position: int) -> int:
    """Return the seed that gives the random numbers of `seed` from output token `position` on.

    The engine's number at position p is a function of mix(seed + GAMMA) + (p + 1) * GAMMA, with SplitMix64's finaliser
    as mix, which is a bijection (`rollout/sampling/torch_sampler.py`); so a step of the position is one of the seed.
    """
    state = (_mix((seed + _GAMMA) % _WORD) + position * _GAMMA) % _WORD
    signed = (_unmix(state) - _GAMMA) % _WORD
    return signed - _WORD if signed >= _WORD // 2 else signed


_WORD = 1 << 64
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _mix(x: int) -> int:
    x = (x ^ (x >> 30)) * _MIX_1 % _WORD
    x = (x ^ (x >> 27)) * _MIX_2 % _WORD
    return x ^ (x >> 31)


def _unmix(x: int) -> int:
    x = _unshift(x, 31) * pow(_MIX_2, -1, _WORD) % _WORD
    x = _unshift(x, 27) * pow(_MIX_1, -1, _WORD) % _WORD
    return _unshift(x, 30)


def _unshift(x: int, bits: int) -> int:
    """Return the y with y ^ (y >> bits) == x."""
    y = x
    for _ in range(64 // bits):
        y = x ^ (y >> bits)
    return y
