"""The operators that models compute with, each in the module of its name: schema, plain torch, gradient.

Plain forms take every device and every float dtype, matrices row-major, gate rows before up rows; they are the
reference for every other form.  Numerics follow transformers: a norm is computed in float32 and rounded to the model's
dtype before its weight is applied (after, where the weight has an offset); the rotation is done in the model's dtype.
A float64 model stays in float64 throughout.  All floating-point arguments of a call have one dtype, and so has the
result.

An operator's C++ is in `csrc/NAME.cpp`, its Triton kernel in `gpu/NAME.py`.

T tokens, D hidden, O output features, E logical experts, K top-k, I intermediate, H query heads, Hkv key/value heads,
hd head size, rd rotated elements of it, S slots of the KV pool; of latent attention R latent, v value size of a head.
"""

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules

from rollout.kernels.operator import Operator

OPERATORS: Mapping[str, Operator] = {
    module.name: getattr(import_module(f"{__name__}.{module.name}"), module.name) for module in iter_modules(__path__)
}
