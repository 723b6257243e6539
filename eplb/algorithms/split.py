"""The weighted split of one layer: how the tokens of each expert are divided over its slots, as slots change.

`LayerSplit` keeps rank loads as level as the placement allows.  Divisions of tokens over replicas reach the rank loads
of a base polytope, whose point of least sum of squares is also the point whose largest load is smallest; `settle` goes
there by levelling one expert's ranks after another.  Whether all ranks can be under a cap is a maximum flow: `relieve`.
Plain Python on purpose: a layer has some dozens of replicated experts, and a change touches few of them.

E logical experts, G ranks.  Loads are multiples of the mean load of a rank.
"""

from __future__ import annotations

from collections import deque

LEVEL = 1.001  # largest load that is level enough
PRECISION = 1e-4  # load over the least possible
NEGLIGIBLE = 1e-5  # load over the cap, or flow of a replica, that counts as none


class LayerSplit:
    """The experts and the load of each rank in one layer.

    `loads[g]` load of rank g; `held[g]` experts in the slots of rank g, and `shared[g]` its experts with several slots;
    `flows[e]`, only for experts with several slots: load that each rank which holds e takes of it, by rank.
    """

    __slots__ = ("flows", "held", "loads", "shared", "shares")

    def __init__(self, shares: list[float], held: list[list[int]]) -> None:
        """Divide each expert's load evenly.  `shares[e]`: load of expert e.  No rank may hold an expert twice."""
        self.shares = shares
        self.held = held
        holders: dict[int, list[int]] = {}
        for rank, experts in enumerate(held):
            for expert in experts:
                holders.setdefault(expert, []).append(rank)
        self.loads = [0.0] * len(held)
        self.flows: dict[int, dict[int, float]] = {}
        for expert, ranks in holders.items():
            for rank in ranks:
                self.loads[rank] += shares[expert] / len(ranks)
            if len(ranks) > 1:
                self.flows[expert] = dict.fromkeys(ranks, shares[expert] / len(ranks))
        self.shared = [[expert for expert in experts if expert in self.flows] for experts in held]

    def clone(self) -> LayerSplit:
        """Return an independent copy; the slots of a rank are shared until they change."""
        other = LayerSplit.__new__(LayerSplit)
        other.shares = self.shares
        other.held = self.held[:]
        other.shared = self.shared[:]
        other.loads = self.loads[:]
        other.flows = {expert: flow.copy() for expert, flow in self.flows.items()}
        return other

    def flow(self, expert: int, rank: int) -> float:
        """Return the load of `expert` that `rank`, which holds it, takes."""
        flow = self.flows.get(expert)
        return self.shares[expert] if flow is None else flow[rank]

    def replace(self, rank: int, slot: int, expert: int, source: int) -> None:
        """Put `expert`, which `source` and not `rank` holds, into a slot of `rank` whose expert has other slots."""
        held = self.held[rank] = self.held[rank][:]
        victim, held[slot] = held[slot], expert
        victim_flow = self.flows[victim]
        left = victim_flow.pop(rank)
        self.loads[rank] -= left
        lightest = min(victim_flow, key=self.loads.__getitem__)
        victim_flow[lightest] += left
        self.loads[lightest] += left
        if len(victim_flow) == 1:
            del self.flows[victim]
            self.shared[lightest] = [other for other in self.shared[lightest] if other != victim]
        if expert not in self.flows:
            self.flows[expert] = {source: self.shares[expert]}
            self.shared[source] = [*self.shared[source], expert]
        self.flows[expert][rank] = 0.0
        self.shared[rank] = [*(other for other in self.shared[rank] if other != victim), expert]

    def exchange(self, rank: int, slot: int, other: int, other_slot: int) -> None:
        """Exchange experts of two ranks, neither of which holds the other's, and the load that they take of them."""
        held, other_held = self.held[rank][:], self.held[other][:]
        for expert, giver, taker in ((held[slot], rank, other), (other_held[other_slot], other, rank)):
            moved = self.flow(expert, giver)
            self.loads[giver] -= moved
            self.loads[taker] += moved
            if expert in self.flows:
                del self.flows[expert][giver]
                self.flows[expert][taker] = moved
                self.shared[giver] = [kept for kept in self.shared[giver] if kept != expert]
                self.shared[taker] = [*self.shared[taker], expert]
        held[slot], other_held[other_slot] = other_held[other_slot], held[slot]
        self.held[rank], self.held[other] = held, other_held

    def relieve(self, cap: float) -> tuple[float, list[bool]]:
        """Pass load on from ranks over `cap` along chains of replicas to ranks under it, as far as that goes.

        Returns the load that stays over the cap, the least possible, and which ranks it is stuck on: these and the
        ranks that could take over from them, all at the cap or over it (maximum flow by augmenting paths, and its
        minimum cut).
        """
        loads = self.loads
        stuck = [False] * len(loads)
        excess = 0.0
        for rank, load in enumerate(loads):
            if stuck[rank]:  # its way out was sought from another rank
                excess += max(0.0, load - cap)
            while loads[rank] > cap + NEGLIGIBLE and not stuck[rank]:
                came, end = self._way_out(rank, cap, stuck)
                if end >= 0:
                    self._pass_on(came, end, cap)
                    continue
                for reached in came:
                    stuck[reached] = True
                excess += loads[rank] - cap
        return excess, stuck

    def _way_out(self, rank: int, cap: float, stuck: list[bool]) -> tuple[dict[int, tuple[int, int]], int]:
        """Search for the nearest rank with room; ranks that are known to be stuck lead nowhere.

        Return for each rank reached the (rank, expert) that load would come from, and the rank found or -1.
        """
        loads, flows, shared = self.loads, self.flows, self.shared
        came = {rank: (-1, -1)}
        queue = deque(came)
        seen = set()  # experts all of whose ranks were reached
        while queue:
            rank = queue.popleft()
            for expert in shared[rank]:
                if expert in seen or (flow := flows[expert])[rank] <= NEGLIGIBLE:
                    continue
                seen.add(expert)
                for other in flow:
                    if other not in came and not stuck[other]:
                        came[other] = (rank, expert)
                        if loads[other] < cap - NEGLIGIBLE:
                            return came, other
                        queue.append(other)
        return came, -1

    def _pass_on(self, came: dict[int, tuple[int, int]], end: int, cap: float) -> None:
        """Move as much load as possible along the path that led to `end`."""
        path, rank, amount = [], end, cap - self.loads[end]
        while True:
            before, expert = came[rank]
            if before < 0:
                break
            amount = min(amount, self.flows[expert][before])
            path.append((before, rank, expert))
            rank = before
        amount = min(amount, self.loads[rank] - cap)
        for before, after, expert in path:
            self.flows[expert][before] -= amount
            self.flows[expert][after] += amount
        self.loads[rank] -= amount
        self.loads[end] += amount

    def settle(self) -> None:
        """Make the largest load of a rank the least possible, to within `PRECISION`.

        The ranks that load is stuck on share it evenly at best, so their mean is the next cap to try (Dinkelbach).
        """
        cap = LEVEL
        while True:
            excess, stuck = self.relieve(cap)
            ranks = [load for load, is_stuck in zip(self.loads, stuck, strict=True) if is_stuck]
            if excess <= PRECISION:
                return
            cap = max(cap + PRECISION, sum(ranks) / len(ranks))
