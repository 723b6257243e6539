"""From the tensors of one call to logical tensors as the model will hold them, checked before any of it is stored.

    wire tensors -> boxes, pairs put together -> split -> content checked as it was sent -> converted -> checked again

    quantised weight, in parts                    its values are held
    plain tensor of another dtype                 cast
    plain tensor of one that is to be quantised   what its `HeldFormat` makes of it is held
    any other                                     held as it was sent

Each logical tensor is quantised by itself and as a whole, whatever part of it this rank holds.

Several wire names can lead to one logical tensor (tied embeddings: `lm_head.weight` and `model.embed_tokens.weight`).
A tensor that came under one name may come again under another if its content is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from weight_sync.assembly import Assembly, PairedTensors, WireTensor
from weight_sync.content import Content, Contents, TensorTable, by_name
from weight_sync.content_check import check_content, is_finite, matching
from weight_sync.errors import ContentError, CoverageError, listed
from weight_sync.fingerprint import fingerprint
from weight_sync.held_format import AS_SENT, HeldFormats, kept_pair, piece_of
from weight_sync.ledger import Numbers, WeightLedger
from weight_sync.manifest import Stated
from weight_sync.pair_plan import PlannedPairs
from weight_sync.paired_wire import value_metas
from weight_sync.plan import BucketPlan
from weight_sync.rank_cover import RankCover, RankShares
from weight_sync.rank_parts import Exchange
from weight_sync.splitting import Announced, is_exact_cast, split_wire
from weight_sync.staging import WeightSink
from weight_sync.take_pairs import PairsFound
from weight_sync.tensor_meta import LogicalWeights, PackedBucket, Pair, Part, Piece, TensorMeta, dtype_name

_NONE = np.zeros(0, dtype=np.int64)


class Arrival(NamedTuple):
    """A logical tensor, which is a piece of the wire tensor `wire_name`.

    `content`: its values.  `pair`: what is held of it, where its values do not determine that.
    """

    wire_name: str
    piece: Piece
    content: torch.Tensor
    pair: Pair | None = None

    @property
    def name(self) -> str:
        """The name of the logical tensor."""
        return self.piece.name


@dataclass(frozen=True)
class ProvenPart:
    """The part that this rank will hold of logical tensor `name`; None: nothing.

    Together with the other ranks' parts it was proved that the whole will have fingerprint `fingerprint`.
    """

    name: str
    part: Part | None
    fingerprint: int


class Intake:
    """The intake of one refresh.  `stated`: the fingerprints that the sender announced.

    `quantised`: logical tensors that are held quantised.  `contents`: the content of the tensors that came.  `cover`:
    of an update per rank.
    """

    def __init__(
        self,
        weights: LogicalWeights,
        table: TensorTable,
        stated: Stated,
        quantised: HeldFormats = AS_SENT,
        cover: RankCover | None = None,
    ) -> None:
        self._cover = cover
        self._parts: list[Numbers] = []  # the tensors of which all boxes came that this rank keeps
        self.contents = Contents(table)
        self.pairs = PairedTensors(weights)
        self._assembly = Assembly()
        self._table = table
        self._weights = weights
        self._stated = stated
        self._quantised = quantised
        self._announced: Announced = {}
        # F as sent and held, uint64 [T, 2], and dtypes of what comes in boxes.
        self._shares: tuple[np.ndarray, np.ndarray] | None = None

    def announce(self, metas: Sequence[TensorMeta], cast: bool = False) -> None:
        """Check what is known of a bucket before it is received.  Raises as `value_metas` and `split_wire`."""
        values = value_metas(self._weights, metas)
        self._announced = dict(zip(values, split_wire(self._weights, values, cast), strict=True))

    def take_parts(
        self, parts: Iterable[tuple[TensorMeta, torch.Tensor]], ledger: WeightLedger, cast: bool = False
    ) -> list[Arrival]:
        """Take tensors and boxes of tensors as `take`.  Raises also as `Assembly.take`."""
        return self.take(self._assembly.take(parts), ledger, cast)

    def take(
        self, bucket: Iterable[tuple[str, torch.Tensor]], ledger: WeightLedger, cast: bool = False
    ) -> list[Arrival]:
        """Return the logical tensors that are whole now, as they are to be held.

        `cast`: see `split_wire`.  Raises `ContentError`, and as `PairedTensors.take` and `split_tensors`.
        """
        tensors = self.pairs.take(bucket)
        named = [(tensor.name, tensor.content) for tensor in tensors]
        arrivals = split_tensors(self._weights, named, ledger, cast, announced=self._announced)
        pairs = {tensor.name: tensor for tensor in tensors if tensor.pair is not None}
        found = self._plain([arrival for arrival in arrivals if arrival.wire_name not in pairs] if pairs else arrivals)
        for arrival in arrivals if pairs else ():
            if arrival.wire_name in pairs:
                found[arrival.name] = self._of_pair(arrival, pairs[arrival.wire_name])
        arrivals = self._converted(arrivals, found, pairs)
        for name, content in found.items():
            self.contents.put(self._table.number_of[name], content)
        return arrivals

    def is_clear(self, plan: BucketPlan, ledger: WeightLedger) -> bool:
        """Return whether nothing came of the planned whole tensors, and no part of them waits."""
        return ledger.is_clear(plan.numbers) and not self.pairs.waits_for_some(plan.came_as)

    def take_planned(
        self, plan: BucketPlan, complete: Numbers, fingerprints_T2: np.ndarray, infinite_T2: np.ndarray
    ) -> None:
        """Check the planned tensors of a bucket by what `take_spans` found in them, and note their content.

        `complete`: the tensors of which boxes came, and now all.  Raises `ContentError`.
        """
        names = self._table.names
        whole = plan.numbers[: plan.num_plain]
        numbers = whole if plan.boxes is None else np.concatenate([whole, plan.boxes.numbers])
        if infinite_T2[:, 0].any():
            wrong = [names[number] for number in dict.fromkeys(numbers[infinite_T2[:, 0]].tolist())]
            raise ContentError(f"values that are not finite in {listed(wrong)}")
        num_whole = len(whole)
        self._stated.require(whole, fingerprints_T2[:num_whole, 0])
        if plan.boxes is not None:
            self._add_shares(plan, complete, fingerprints_T2[num_whole:])
        if infinite_T2[:, 1].any():
            number = numbers[infinite_T2[:, 1]][0]
            dtype = dtype_name(self._table.metas[number].dtype)
            raise ContentError(f"{names[number]} has values outside the range of {dtype}")
        self.contents.put_all(whole, plan.codes[:num_whole], *fingerprints_T2[:num_whole].T)

    def take_planned_pairs(
        self, plan: PlannedPairs, found: PairsFound, bucket: PackedBucket, ledger: WeightLedger, cast: bool
    ) -> None:
        """Check the planned weights of a bucket by what `take_pairs` found in them, and note their content.

        Raises `ContentError`, and as `take_parts` for a weight that is wrong by itself.
        """
        if found.wrong.any():
            names, places = plan.of(found.wrong)
            self.take_parts(bucket.layout.views(bucket.content, places), ledger, cast)  # tables do not say what it is
            raise ContentError(f"values or scales that cannot be held in {listed(names)}")
        sums_Q4, count = found.sums, plan.num_values
        self._stated.require(plan.numbers[:count], sums_Q4[:count, 0])
        self.contents.put_all(plan.numbers[:count], plan.codes, sums_Q4[:count, 0], sums_Q4[:count, -1])
        for number, metas, values in zip(plan.numbers[count:].tolist(), plan.parts, sums_Q4[count:].tolist()):
            content = Content(tuple(zip(metas, values)), values[-1])
            self._require_parts(self._table.names[number], content)
            self.contents.put(number, content)
        self.pairs.note(plan.wire_names[count:])

    def _require_parts(self, name: str, content: Content) -> None:
        """Raise `ContentError` for a part of a weight whose F is not the one stated, where one is."""
        names = by_name([content])
        self._stated.require_form(name, names)
        matching(names, self._stated)

    def _add_shares(self, plan: BucketPlan, complete: Numbers, shares_P2: np.ndarray) -> None:
        """Add the shares of boxes to the fingerprints of their tensors; check and note the complete ones.

        In an update per rank they have only this rank's shares: `joined` checks and notes them.
        """
        assert plan.boxes is not None
        if self._shares is None:
            self._shares = np.zeros((len(self._table), 2), dtype=np.uint64), np.zeros(len(self._table), dtype=np.uint8)
        (sums, codes), numbers = self._shares, plan.boxes.numbers
        np.add.at(sums, numbers, shares_P2)
        codes[numbers] = plan.codes[plan.num_plain :]
        if self._cover is not None:
            self._parts.append(complete)
            return
        self._stated.require(complete, sums[complete, 0])
        self.contents.put_all(complete, codes[complete], *sums[complete].T)

    def take_part(self, part: ProvenPart) -> None:
        """Note a part of a tensor, which is held as it was sent.  Raises `ContentError`."""
        assert part.name not in self._quantised, "its source refuses tensors that are quantised as a whole"
        matching({part.name: part.fingerprint}, self._stated)
        content = Content.plain(self._weights.metas()[part.name], part.fingerprint)
        self.contents.put(self._table.number_of[part.name], content)

    def joined(self, exchange: Exchange) -> Numbers:
        """Note the content of tensors that other ranks were sent; return the numbers of all that came on any rank.

        One exchange in an update per rank, in any other none.  Raises as `RankCover.join`, and `ContentError`.
        """
        if self._cover is None:
            return _NONE
        mine = RankShares.of_whole(*self.contents.plain())  # tensors that were sent as more than one came on all ranks
        if self._shares is not None:
            (sums, codes), parts = self._shares, np.concatenate(self._parts)
            is_whole = np.zeros(parts.size, np.bool_)
            mine = mine.with_more(RankShares(parts, is_whole, codes[parts], sums[parts, 0], sums[parts, 1]))
        found = self._cover.join(mine, self._table, exchange)
        self._stated.require(found.numbers, found.sent)
        self.contents.put_all(found.numbers, found.codes, found.sent, found.held)
        return found.numbers

    def settle(self) -> None:
        """Raise `CoverageError` for what came in part.  The other part is missing."""
        self.pairs.settle()
        self._assembly.settle()

    def clear(self) -> None:
        """Release what came in part."""
        self.pairs.clear()
        self._assembly.clear()

    def _plain(self, arrivals: Sequence[Arrival]) -> dict[str, Content]:
        """Check the content, and return it as it was sent, taken to be held so."""
        metas = self._weights.metas()
        found = check_content([(arrival.name, arrival.content) for arrival in arrivals], self._stated)
        contents = {name: Content.plain(metas[name], value) for name, value in found.items()}
        for arrival in arrivals:
            meta = metas[arrival.name]
            if arrival.content.dtype != meta.dtype:
                sent = meta._replace(dtype=arrival.content.dtype)
                contents[arrival.name] = Content.plain(sent, found[arrival.name])
        return contents

    def _of_pair(self, arrival: Arrival, tensor: WireTensor) -> Content:
        if not is_finite(arrival.content):
            raise ContentError(f"values that are not finite in {arrival.name}")
        parts = tensor.parts
        if arrival.piece != Piece(arrival.name):
            assert tensor.pair is not None
            parts = dict(zip(parts, piece_of(arrival.piece, tensor.pair)[:2], strict=True))
        sent = tuple(
            (TensorMeta(arrival.name + suffix, part.dtype, tuple(part.shape)), fingerprint(part))
            for suffix, part in parts.items()
        )
        content = Content(sent, fingerprint(arrival.content))
        self._require_parts(arrival.name, content)
        return content

    def _converted(
        self, arrivals: list[Arrival], found: dict[str, Content], pairs: Mapping[str, WireTensor]
    ) -> list[Arrival]:
        """Return the arrivals as they are held, where that is not as they came; so noted in `found`."""
        came = {name: tensor.pair for name, tensor in pairs.items()}
        held = [self._held(arrival, came.get(arrival.wire_name)) for arrival in arrivals]
        changed = [new for new, old in zip(held, arrivals, strict=True) if new.content is not old.content]
        if changed:
            checked = check_content([(arrival.name, arrival.content) for arrival in changed], {})
            found |= {name: Content(found[name].sent, value) for name, value in checked.items()}
        return held

    def _held(self, arrival: Arrival, pair: Pair | None) -> Arrival:
        """Return an arrival as it is held: cast, then quantised.  `pair`: of the wire tensor, where it came as one."""
        values, dtype = arrival.content, self._weights.metas()[arrival.name].dtype
        if values.dtype != dtype:
            is_exact = is_exact_cast(values.dtype, dtype)
            values = values.to(dtype)
            if not is_exact and not is_finite(values):
                raise ContentError(f"{arrival.name} has values outside the range of {dtype_name(dtype)}")
            arrival = arrival._replace(content=values)
        held = self._quantised.get(arrival.name)
        if held is None:
            return arrival
        if held.keeps(pair):
            return arrival._replace(pair=kept_pair(arrival.piece, arrival.wire_name, pair, held))
        if pair is not None and not held.of_pairs:
            return arrival
        if held.pairs is None:
            return arrival._replace(content=held.values(values))
        made = held.pairs.quantise(values)
        return arrival._replace(content=held.pairs.values(made, dtype), pair=made)


# --- into a sink ------------------------------------------------------------------------------------------------------


def load_weights(
    weights: LogicalWeights,
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    sink: WeightSink,
    ledger: WeightLedger,
    cast: bool,
) -> None:
    """Validate wire tensors, split them, note them in the ledger and write them into the sink.

    Raises as `split_tensors` and `store`.
    """
    store(split_tensors(weights, named_tensors, ledger, cast), sink, ledger)


def split_tensors(
    weights: LogicalWeights,
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    ledger: WeightLedger,
    cast: bool,
    announced: Announced | None = None,
) -> list[Arrival]:
    """Return the logical tensors of one call, views, validated together before any of them is written.

    `cast`: see `split_wire`; content is as it came, and cast by whom takes it.  Raises as `split_wire`, and
    `CoverageError` for a tensor that came before or was not announced.
    """
    named = list(named_tensors)
    metas = [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named]
    split = split_wire(weights, metas, cast, announced)
    refusals = ledger.refusals((meta.name, piece.name) for meta, pieces in zip(metas, split) for piece in pieces)
    if refusals:
        raise CoverageError(listed(refusals))
    expected = weights.metas()
    arrivals = [
        Arrival(wire_name, piece, piece.of(tensor.detach()))
        for (wire_name, tensor), pieces in zip(named, split, strict=True)
        for piece in pieces
    ]
    assert all(tuple(arrival.content.shape) == expected[arrival.name].shape for arrival in arrivals)
    return arrivals


def store(arrivals: Iterable[Arrival], sink: WeightSink, ledger: WeightLedger) -> None:
    """Note logical tensors in the ledger and write them into the sink.

    Raises `CoverageError` for a tensor that came before, `ContentError` for one that came before under another name
    with other content.
    """
    for arrival in arrivals:
        wire_name, name, content = arrival.wire_name, arrival.name, arrival.content
        if ledger.record(wire_name, name):
            sink.write(name, content if arrival.pair is None else arrival.pair)
        elif not all(_same_bits(part, content) for part in sink.read(name)):  # other ranks check their parts
            raise ContentError(f"{name} came again as {wire_name} with other content")


def load_part(proven: ProvenPart, sink: WeightSink, ledger: WeightLedger) -> None:
    """Note a part of a logical tensor in the ledger and write it into the sink.

    Raises `CoverageError` for a tensor that came before or was not announced, `ContentError` for one that is not
    finite.
    """
    name, part = proven.name, proven.part
    if part is not None and not is_finite(part.content):
        raise ContentError(f"values that are not finite in {name}")
    if not ledger.record(name, name):
        raise CoverageError(f"{name} came already under another name")
    if part is not None:
        sink.write(name, part)


def _same_bits(part: Part, source: torch.Tensor) -> bool:
    """Return whether storing `source`, a whole tensor, would store the same bits."""
    stored = part.content
    mine = source if part.region is None else part.region.of(source)
    cast = mine.to(device=stored.device, dtype=stored.dtype)
    return torch.equal(
        stored.contiguous().view(-1).view(torch.uint8),
        cast.contiguous().view(-1).view(torch.uint8),
    )
