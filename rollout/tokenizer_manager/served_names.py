"""`ServedNames`: which adapter a request names, by the field `model` or `lora_path`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rollout.core.adapter_names import adapter_ref, awaited_adapter
from rollout.core.errors import BadRequest, NotFound, UnsupportedFeature
from rollout.core.known_fields import shown
from rollout.core.messages.req_output import AdapterCard
from rollout.tokenizer_manager.request import ExpandedRequest, GenerateReqInput


class ServedNames:
    """The names of the base model, and the newest version of each adapter, by name.

    `adapters` None: the server has no slots for any.  The scheduler tells of changes, and decides: it alone knows which
    older versions a request may pin.  `awaited`: names that are registered, and wait for their first weights.
    """

    def __init__(self, base: Sequence[str] = (), cards: Iterable[AdapterCard] | None = None) -> None:
        self.base = base
        self.adapters: dict[str, AdapterCard] | None = None
        self.awaited: Collection[str] = ()
        if cards is not None:
            self.set_adapters(cards)

    def set_adapters(self, cards: Iterable[AdapterCard], awaited: Collection[str] = ()) -> None:
        """Take note of the versions in memory, oldest load first, and of awaited names."""
        self.adapters = {card.label.name: card for card in cards}
        self.awaited = awaited

    def complete(self, expanded: ExpandedRequest, request: GenerateReqInput) -> None:
        """Fill in the adapter of each message, and check that it is served.

        A prompt's own `lora_path` counts; without one, the `model` of the request.  A server without adapters takes any
        `model`.  Raises `NotFound` for a name that is not served, `UnsupportedFeature` for an adapter of a server
        without any, `BadRequest` where the two fields name different adapters.
        """
        by_model = self._adapter_of_model(request.model)
        for message in expanded.messages:
            name = message.lora_name
            if name is not None and by_model is not None and name != by_model:
                raise BadRequest(f"model names the adapter {shown(by_model)}, and lora_path {shown(name)}")
            if name is not None:
                self._require(name)
            message.lora_name = by_model if name is None else name

    def _adapter_of_model(self, model: str | None) -> str | None:
        """Return the adapter that `model` names: alone, or as BASE:ADAPTER in SGLang's way."""
        if model is None or self.adapters is None or model in self.base:
            return None
        if adapter_ref(model).name in self.adapters:
            return model
        base = next((base for base in self.base if model.startswith(f"{base}:")), None)
        name = None if base is None else model.removeprefix(f"{base}:")
        if name is None or adapter_ref(name).name not in self.adapters:
            self._require_not_awaited(model if name is None else name)
            raise NotFound(
                f"the model {shown(model)!r} does not exist; this server has {', '.join((*self.base, *self.adapters))}"
            )
        return name

    def _require(self, name: str) -> None:
        if self.adapters is None:
            raise UnsupportedFeature(
                "lora_path is not supported: this server has no adapters; start it with --enable-lora"
            )
        if adapter_ref(name).name not in self.adapters:
            self._require_not_awaited(name)
            raise NotFound(
                f"lora_path: there is no adapter {shown(name)!r}; this server has {', '.join(self.adapters) or 'none'}"
            )

    def _require_not_awaited(self, name: str) -> None:
        """Raise `NotFound`, with the reason, for a registered adapter whose first weights have not come."""
        if adapter_ref(name).name in self.awaited:
            raise NotFound(awaited_adapter(name))
