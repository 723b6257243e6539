"""`IgnoredFields`: the unknown fields of a generation request, for its answer and once for the log."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rollout.core.errors import BadRequest
from rollout.core.known_fields import KNOWN_SAMPLING_FIELDS, MAX_IGNORED, shown, unknown_field
from rollout.tokenizer_manager.request import GenerateReqInput

logger = logging.getLogger(__name__)

MAX_LOGGED = 256
"""Names in the log: they come from clients."""


class IgnoredFields:
    def __init__(self, *, is_strict: bool) -> None:
        self._is_strict = is_strict
        self._logged: set[str] = set()

    def of(self, request: GenerateReqInput, sampling_keys: Sequence[str]) -> list[str]:
        """Return the paths of the unknown fields of a body, and of the unknown keys of `sampling_params`.

        Raises `BadRequest` for such a key under --strict-requests; bodies were checked as they were read.
        """
        if sampling_keys and self._is_strict:
            raise BadRequest(unknown_field(f"sampling_params.{sampling_keys[0]}", KNOWN_SAMPLING_FIELDS))
        names = [shown(f"sampling_params.{key}") for key in sampling_keys[:MAX_IGNORED]]
        for name in names:
            if name not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(name)
                logger.warning("%s is not known and has no effect", name)
        return [*request.ignored_fields, *names]
