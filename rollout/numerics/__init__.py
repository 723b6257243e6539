"""Engine numerics for a trainer: a Hugging Face model that computes with the engine's operators, bit for bit.

assembly     the engine's matrices, made of a trainer's tensors
adapters     the LoRA adapter of a model of PEFT
operators    operators under autograd: the engine's results, the gradients of plain forms
attention    attention under autograd
sequences    a trainer's batch as one step of the engine
engine       the engine's model over a trainer's tensors
logprobs     `engine_logprobs`, `with_gradient_of`
checks       refused models and arguments
model        `use_engine_numerics`

It imports `capture`, `eplb`, `weight_sync`, `rollout.adapters`, `rollout.attention`, `rollout.core`,
`rollout.families`, `rollout.kernels`, `rollout.layers`, `rollout.memory`, `rollout.model` and `rollout.sampling`.
"""

from rollout.numerics.logprobs import engine_logprobs, with_gradient_of
from rollout.numerics.model import EngineNumerics, use_engine_numerics

__all__ = ["EngineNumerics", "engine_logprobs", "use_engine_numerics", "with_gradient_of"]
