"""`SendingMeshes`: which trainer ranks send what is placed on a device mesh."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh


class SendingMeshes:
    """`members`: the global ranks of the trainers' group.

    A mesh may be a part of a larger one: `dp` of [dp, tp] where tensor parallelism leaves a norm alone.  Then each rank
    of `tp` has the norm on a mesh of its own, and the first of these whose ranks are all in the group sends it.  So all
    ranks name the same ranks, whichever mesh is theirs.
    """

    def __init__(self, members: Sequence[int]) -> None:
        self._members = frozenset(members)
        self._known: dict[DeviceMesh, list[int]] = {}

    def ranks(self, mesh: DeviceMesh) -> list[int]:
        """Return the global ranks that send, in row-major order of the mesh; its own where none are in the group."""
        if mesh not in self._known:
            alike = (ranks for ranks in _alike(mesh) if self._members.issuperset(ranks))
            self._known[mesh] = next(alike, mesh.mesh.flatten().tolist())
        return self._known[mesh]


def _alike(mesh: DeviceMesh) -> Iterator[list[int]]:
    """Yield the global ranks of each mesh that lies in the same larger mesh in the same way, in its order."""
    root = mesh._get_root_mesh().mesh
    places = torch.stack([(root == rank).nonzero()[0] for rank in mesh.mesh.flatten()])
    fixed = (places == places[0]).all(0).tolist()
    for at in itertools.product(*(range(size) if one else [None] for size, one in zip(root.shape, fixed))):
        index = [places[:, dim] if place is None else place for dim, place in enumerate(at)]
        yield root[tuple(index)].flatten().tolist()
