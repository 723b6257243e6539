"""`JsonList`: a list that is sent often, with its JSON.  Needs no torch."""

from __future__ import annotations

import functools
import json
from typing import Any, NoReturn


class JsonList(list[Any]):
    """A list that does not change, and whose JSON is made once.

    A control that knows this type sends `json` as it is.  Any other sees a list.
    """

    @functools.cached_property
    def json(self) -> bytes:
        """The list as JSON, in ASCII and without white space.  Raises `TypeError` for what JSON cannot hold."""
        return json.dumps(self, separators=(",", ":"), allow_nan=False).encode()

    def __reduce__(self) -> tuple[type[JsonList], tuple[list[Any]]]:
        return JsonList, (list(self),)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("a JsonList does not change, as its JSON was made once; make another one")

    append = extend = insert = pop = remove = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
