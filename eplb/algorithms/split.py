"""The weighted split of one layer: how the tokens of each expert are divided over its slots, as slots change.

`LayerSplit` keeps rank loads as level as the placement allows.  Divisions of tokens over replicas reach the rank loads
of a base polytope, whose point of least sum of squares is also the point whose largest load is smallest; `settle` goes
there by levelling one expert's ranks after another.  Whether all ranks can be under a cap is a maximum flow: `relieve`.
Plain Python on purpose: a layer has some dozens of replicated experts, and a change touches few of them.

E logical experts, G ranks.  Loads are multiples of the mean load of a rank.
"""

from __future__ import annotations

from collections import deque

PRECISION = 3e-4  # shifts of load that are not worth following
NEGLIGIBLE = 1e-5  # load over the cap, or flow of a replica, that counts as none
MOST_STEPS = 20_000  # levellings of one call


class LayerSplit:
    """Who holds what in one layer, and who takes which load.

    `loads[g]` load of rank g; `held[g]` experts in the slots of rank g; `flows[e]`, only for experts with several
    slots: load that each rank which holds e takes of it, by rank.
    """

    __slots__ = ("flows", "held", "loads", "shares")

    def __init__(self, shares: list[float], held: list[list[int]]) -> None:
        """`shares[e]` load of expert e.  No rank may hold an expert twice."""
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

    def clone(self) -> LayerSplit:
        """An independent copy; the slots of a rank are shared until they change."""
        other = LayerSplit.__new__(LayerSplit)
        other.shares = self.shares
        other.held = self.held[:]
        other.loads = self.loads[:]
        other.flows = {expert: flow.copy() for expert, flow in self.flows.items()}
        return other

    def flow(self, expert: int, rank: int) -> float:
        """Load of `expert` that `rank`, which holds it, takes."""
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
        self.flows.setdefault(expert, {source: self.shares[expert]})[rank] = 0.0

    def exchange(self, rank: int, slot: int, other: int, other_slot: int) -> None:
        """Two ranks exchange experts that have one slot each."""
        held, other_held = self.held[rank][:], self.held[other][:]
        moved = self.shares[held[slot]] - self.shares[other_held[other_slot]]
        held[slot], other_held[other_slot] = other_held[other_slot], held[slot]
        self.held[rank], self.held[other] = held, other_held
        self.loads[rank] -= moved
        self.loads[other] += moved

    def relieve(self, cap: float) -> tuple[float, list[bool]]:
        """Pass load on from ranks over `cap` along chains of replicas to ranks under it, as far as that goes.

        Returns the load that stays over the cap, the least possible, and which ranks it is stuck on: these and the
        ranks that could take over from them, all at the cap or over it (maximum flow by augmenting paths, and its
        minimum cut).
        """
        loads, flows, held = self.loads, self.flows, self.held
        while True:
            came: dict[int, tuple[int, int]] = {
                rank: (-1, -1) for rank, load in enumerate(loads) if load > cap + NEGLIGIBLE
            }
            queue = deque(came)
            end = -1
            while queue and end < 0:
                rank = queue.popleft()
                for expert in held[rank]:
                    flow = flows.get(expert)
                    if flow is None or flow[rank] <= NEGLIGIBLE:
                        continue
                    for other in flow:
                        if other not in came:
                            came[other] = (rank, expert)
                            if loads[other] < cap - NEGLIGIBLE:
                                end = other
                                break
                            queue.append(other)
                    if end >= 0:
                        break
            if end < 0:
                stuck = [rank in came for rank in range(len(loads))]
                return sum(load - cap for load in loads if load > cap + NEGLIGIBLE), stuck
            self._pass_on(came, end, cap)

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
        """Level the ranks of every replicated expert, to within small shifts."""
        flows, loads, held = self.flows, self.loads, self.held
        queue = deque(flows)
        queued = set(queue)
        steps = MOST_STEPS
        while queue and steps:
            steps -= 1
            expert = queue.popleft()
            queued.discard(expert)
            flow = flows[expert]
            touched = _level(flow, loads, self.shares[expert])
            for rank in touched:
                for neighbour in held[rank]:
                    if neighbour in flows and neighbour != expert and neighbour not in queued:
                        queued.add(neighbour)
                        queue.append(neighbour)


def _level(flow: dict[int, float], loads: list[float], share: float) -> list[int]:
    """Pour the load of an expert into its ranks, lowest first, up to one level; the ranks that changed."""
    floors = sorted((loads[rank] - taken, rank) for rank, taken in flow.items())
    total, count, level = share, 0, 0.0
    for floor, _ in floors:
        if count and floor >= level:
            break
        total += floor
        count += 1
        level = total / count
    touched = []
    for index, (floor, rank) in enumerate(floors):
        poured = level - floor if index < count else 0.0
        change = poured - flow[rank]
        if abs(change) > PRECISION:
            touched.append(rank)
    if touched:
        for index, (floor, rank) in enumerate(floors):
            flow[rank] = level - floor if index < count else 0.0
            loads[rank] = floor + flow[rank]
    return touched
