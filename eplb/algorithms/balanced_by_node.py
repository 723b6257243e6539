"""`balanced_by_node`: every slot of an expert on one node, and never two on one rank.

Expert groups go to nodes as in `deepseek_hierarchical`.  Inside each node slots are placed as by `balanced`.

Shapes: L MoE layers, E logical experts, P physical experts (slots), N nodes.
"""

from __future__ import annotations

import numpy as np

from eplb.algorithms.balanced import balanced
from eplb.algorithms.deepseek import experts_by_node, experts_of_nodes
from eplb.algorithms.types import ExpertLayout, Plan, checked_counts, even_split


def balanced_by_node(counts_LE: np.ndarray, layout: ExpertLayout) -> Plan:
    """Return a placement for these counts from nothing.

    Raises `LoadsError`; `LayoutError` where groups do not divide over the nodes, or where a rank has more slots than
    its node has experts.
    """
    counts_LE, nodes = checked_counts(counts_LE, layout), layout.num_nodes
    layers, experts = counts_LE.shape
    by_node_LE = experts_by_node(counts_LE.astype(np.float32), layout)
    of_a_node = ExpertLayout(
        num_logical_experts=experts // nodes,
        num_physical_experts=layout.num_physical_experts // nodes,
        num_ranks=layout.num_ranks // nodes,
    )
    node_counts = np.take_along_axis(counts_LE, by_node_LE, axis=1).reshape(layers * nodes, experts // nodes)
    local = balanced(node_counts, of_a_node).physical_to_logical_LP.reshape(layers, nodes, -1)
    physical_to_logical = experts_of_nodes(local, by_node_LE)
    reason = "keeps every expert group on one node, then places evenly inside each node"
    return Plan("balanced_by_node", reason, layout, physical_to_logical, even_split(physical_to_logical, experts))
