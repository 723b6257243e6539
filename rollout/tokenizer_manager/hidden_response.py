"""The hidden states of a sample in its answer: SGLang's nested lists, or the bytes of the rows.

    nested     [[row, row, .. of the prompt's tokens], row, row, .. of the output's tokens but the last]
    compact    {"dtype", "shape": [tokens, layers, hidden size], "data"}

A row is a list of the numbers of a layer, or of such lists where the request names its layers.
"""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from capture.hidden_states import HiddenStates
from rollout.core.errors import LockstepError
from rollout.core.messages.hidden import HiddenStatesParams
from rollout.core.messages.req_output import FinishedRecord, HiddenStatesRows
from rollout.tokenizer_manager.request import HiddenForm
from rollout.tokenizer_manager.sample import SampleRecord


def add_hidden_states(
    meta: dict[str, Any], record: SampleRecord, finished: FinishedRecord, form: HiddenForm, *, is_binary: bool
) -> None:
    """Add the rows of a sample that has ended, their layers, their first position and their weights."""
    params, rows = record.source.hidden_states, finished.hidden_states
    assert params is not None, "the request wants no hidden states"
    _require_all(record, finished, params)
    if form == "compact":
        meta["hidden_states"] = None if rows is None else _compact(rows, is_binary=is_binary)
    else:
        meta["hidden_states"] = _nested(rows, params, len(record.prompt_ids), is_single=form == "rows")
    meta["hidden_state_layers"] = list(params.layers)
    meta["hidden_states_start_len"] = params.start
    meta["hidden_states_weight_versions"] = [] if rows is None else list(map(msgspec.structs.asdict, rows.versions))


def _require_all(record: SampleRecord, finished: FinishedRecord, params: HiddenStatesParams) -> None:
    """Raise `LockstepError` if a token lacks its row; a request that was aborted has fewer."""
    end = len(record.prompt_ids) + max(record.num_tokens - 1, 0)  # also of a tail, which comes with all rows
    count = 0 if finished.hidden_states is None else finished.hidden_states.shape[0]
    if finished.reason.type != "abort" and count != max(end - params.start, 0):
        raise LockstepError(f"request {record.rid}: {count} rows of hidden states for {end - params.start} tokens")


def _compact(rows: HiddenStatesRows, *, is_binary: bool) -> dict[str, Any]:
    data = rows.data if is_binary else base64.b64encode(rows.data).decode("ascii")
    return {"dtype": rows.dtype, "shape": rows.shape, "data": data}


def _nested(
    rows: HiddenStatesRows | None, params: HiddenStatesParams, prompt_len: int, *, is_single: bool
) -> list[Any]:
    """Return a list: first the list of the rows of the prompt, then the row of each output token."""
    if rows is None:
        return [[]]
    values_TLD = HiddenStates.of_bytes(rows.data, rows.dtype, rows.shape, params.layers).values
    lists = (values_TLD[:, 0] if is_single else values_TLD).tolist()
    of_prompt = max(prompt_len - params.start, 0)
    return [lists[:of_prompt], *lists[of_prompt:]]
