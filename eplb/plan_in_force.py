"""The placement in force, said as planners say it: so that before and after are measured by one rule.

Shapes: L MoE layers, P physical experts (slots over all ranks), E logical experts, R most replicas of an expert.
"""

from __future__ import annotations

import torch

from eplb.algorithms.types import ExpertLayout, Plan
from eplb.placement import ExpertPlacement
from eplb.split_table import PICKS


def plan_in_force(placement: ExpertPlacement, layout: ExpertLayout) -> Plan:
    """Map and split by which routers go now."""
    table = placement.split()
    located_LP = placement.metadata.physical_to_logical_map
    before_LRE = torch.cat([torch.zeros_like(table.ends_LRE[:, :1]), table.ends_LRE[:, :-1]], dim=1)
    shares_LRE = (table.ends_LRE - before_LRE).clamp(min=0).double() / PICKS
    split_LP = torch.zeros(located_LP.shape, dtype=torch.float64)
    split_LP.scatter_add_(1, table.slots_LRE.flatten(1), shares_LRE.flatten(1))
    reason = f"the placement in force, of epoch {placement.epoch}"
    return Plan("in_force", reason, layout, located_LP.numpy().copy(), split_LP.numpy())
