"""The tokenizer of a checkpoint, read from the data files of its folder.

Ids and text come from `tokenizer.json` through the package `tokenizers`.  The class that `tokenizer_config.json` names
is not asked: transformers builds it from parts of the file, and which parts depends on its version.  No code of a
checkpoint runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from rollout.core.errors import StartupError
from rollout.text.byte_level import moonshot_tokenizer, qwen2_tokenizer

TOKENIZER, CONFIG, SPECIAL_TOKENS, ADDED_TOKENS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
RANKS, VOCAB, MERGES, SENTENCEPIECE = "tiktoken.model", "vocab.json", "merges.txt", "tokenizer.model"
VOCABULARIES = (RANKS, VOCAB, SENTENCEPIECE)
TEMPLATE, TEMPLATE_JSON, MORE_TEMPLATES = "chat_template.jinja", "chat_template.json", "additional_chat_templates"
DEFAULT_TEMPLATE = "default"


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer, and the facts about it in the files next to its vocabulary.

    `special_tokens`: the text of tokens with a role, as `eos_token`; templates read them by these names.
    `chat_templates`: Jinja sources by name.
    """

    backend: Tokenizer
    special_tokens: Mapping[str, str]
    chat_templates: Mapping[str, str]


def has_tokenizer(folder: str | Path) -> bool:
    """Return whether `folder` holds the vocabulary of a tokenizer, readable or not."""
    return any((Path(folder) / name).is_file() for name in (TOKENIZER, *VOCABULARIES))


def read_tokenizer(folder: str | Path) -> TokenizerFiles:
    """Read the tokenizer of `folder`.  Raises `StartupError`, in one line, for a folder without a usable one."""
    folder = Path(folder)
    if not folder.is_dir():
        raise StartupError(f"tokenizer folder {folder} does not exist")
    try:
        return _read(folder)
    except StartupError as error:
        raise StartupError(
            f"no usable tokenizer in {folder} ({error}); give --tokenizer-path or --skip-tokenizer-init"
        ) from error


def _read(folder: Path) -> TokenizerFiles:
    config = _read_object(folder / CONFIG)
    declared = _declared_tokens(config)
    if declared is None:
        config |= _read_object(folder / SPECIAL_TOKENS)
    roles = _tokens_with_roles(config)
    backend = _backend(folder, config, declared or {})
    if declared is None:
        declared = dict(backend.get_added_tokens_decoder()) | _old_declared_tokens(folder, roles)
    _add_tokens(backend, declared, roles, _extra_tokens(config))
    _check_ids(backend, declared)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    special = {role: token.content for role, token in roles.items()}
    return TokenizerFiles(backend, special, _chat_templates(folder, config))


def _backend(folder: Path, config: dict[str, Any], declared: dict[int, AddedToken]) -> Tokenizer:
    path = folder / TOKENIZER
    if path.is_file():
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise StartupError(f"{TOKENIZER} cannot be read: {_one_line(error)}") from None
    names = _class_names(config)
    if (folder / RANKS).is_file() and "TikTokenTokenizer" in names:
        return moonshot_tokenizer(folder / RANKS, declared)
    if (folder / VOCAB).is_file() and (folder / MERGES).is_file() and "Qwen2Tokenizer" in names:
        return qwen2_tokenizer(folder / VOCAB, folder / MERGES)
    for other in VOCABULARIES:
        if (folder / other).is_file():
            raise StartupError(
                f"it has {other} of the class {' or '.join(names) or 'unknown'} but no {TOKENIZER}. Make one with "
                "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...) and check its ids."
            )
    raise StartupError(f"it has no {TOKENIZER}")


def _class_names(config: dict[str, Any]) -> list[str]:
    """Return the names of the classes that read these files.  A class in the checkpoint's own code is not loaded."""
    auto_map = config.get("auto_map")
    classes = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else auto_map
    named = [config.get("tokenizer_class"), *(classes if isinstance(classes, list) else [classes])]
    names = [name.rpartition(".")[2].removesuffix("Fast") for name in named if isinstance(name, str)]
    return list(dict.fromkeys(names))


# --- tokens outside the vocabulary ---------------------------------------------------------------------------------


def _declared_tokens(config: dict[str, Any]) -> dict[int, AddedToken] | None:
    """Return the tokens that the configuration lists, by id; None for one of the older form, which lists none."""
    declared = config.get("added_tokens_decoder")
    if declared is None:
        return None
    try:
        return {int(index): _token(value) for index, value in sorted(declared.items(), key=lambda item: int(item[0]))}
    except (AttributeError, ValueError) as error:
        raise StartupError(f"{CONFIG}: added_tokens_decoder cannot be read: {error}") from None


def _old_declared_tokens(folder: Path, roles: Mapping[str, AddedToken]) -> dict[int, AddedToken]:
    """Return the tokens in `added_tokens.json`, by id."""
    ids = _read_object(folder / ADDED_TOKENS)
    if not all(isinstance(index, int) for index in ids.values()):
        raise StartupError(f"{ADDED_TOKENS} must give each token its id")
    special = {token.content for token in roles.values()}
    return {
        index: AddedToken(text, special=text in special, normalized=text not in special) for text, index in ids.items()
    }


def _tokens_with_roles(config: dict[str, Any]) -> dict[str, AddedToken]:
    named = {key: value for key, value in config.items() if key.endswith("_token")}
    for key in ("model_specific_special_tokens", "extra_special_tokens"):
        if isinstance(config.get(key), dict):
            named |= config[key]
    return {key: _token(value) for key, value in named.items() if isinstance(value, str | dict)}


def _extra_tokens(config: dict[str, Any]) -> list[AddedToken]:
    """Return the special tokens without a role."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    return [_token(value) for value in extra] if isinstance(extra, list) else []


def _token(value: Any) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=True)
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise StartupError(f"{CONFIG}: {str(value)[:80]!r} is not a token")
    flags = ("lstrip", "rstrip", "normalized", "single_word", "special")
    return AddedToken(value["content"], **{flag: value[flag] for flag in flags if isinstance(value.get(flag), bool)})


def _add_tokens(
    backend: Tokenizer, declared: Mapping[int, AddedToken], roles: Mapping[str, AddedToken], extra: list[AddedToken]
) -> None:
    """Add tokens that the vocabulary lacks, and make tokens special that are declared so or have a role.

    A token of the vocabulary keeps its id, and stays special if it is.
    """
    with_role = {token.content for token in roles.values()}
    wanted = [token for _, token in sorted(declared.items())]
    known = {token.content for token in [*backend.get_added_tokens_decoder().values(), *wanted]}
    for token in [*roles.values(), *extra]:
        if token.content not in known:
            wanted.append(token)
            known.add(token.content)
    backend.add_tokens([_as_special(token) if token.content in with_role else token for token in wanted])


def _as_special(token: AddedToken) -> AddedToken:
    flags = {"lstrip": token.lstrip, "rstrip": token.rstrip, "single_word": token.single_word}
    return AddedToken(token.content, **flags, normalized=token.normalized, special=True)


def _check_ids(backend: Tokenizer, declared: Mapping[int, AddedToken]) -> None:
    for index, token in declared.items():
        found = backend.token_to_id(token.content)
        if found != index:
            raise StartupError(
                f"{CONFIG} gives token {token.content!r} the id {index}, but the vocabulary gives {found}"
            )


# --- templates -----------------------------------------------------------------------------------------------------


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return templates by name.  Files win over the configuration, and the configuration over the processors' file."""
    templates = _named_templates(_read_object(folder / TEMPLATE_JSON).get("chat_template"))
    templates |= _named_templates(config.get("chat_template"))
    more = folder / MORE_TEMPLATES
    for path in sorted(more.glob("*.jinja")) if more.is_dir() else ():
        templates[path.stem] = _read_text(path)
    if (folder / TEMPLATE).is_file():
        templates[DEFAULT_TEMPLATE] = _read_text(folder / TEMPLATE)
    return templates


def _named_templates(given: Any) -> dict[str, str]:
    """Return templates by name, given as a single template, a list of named ones, or an object of them."""
    if given is None:
        return {}
    if isinstance(given, str):
        return {DEFAULT_TEMPLATE: given}
    pairs: list[tuple[Any, Any]] | None = list(given.items()) if isinstance(given, dict) else None
    if isinstance(given, list) and all(isinstance(entry, dict) for entry in given):
        pairs = [(entry.get("name"), entry.get("template")) for entry in given]
    if pairs is None or not all(isinstance(name, str) and isinstance(text, str) for name, text in pairs):
        raise StartupError("chat_template must be a text, or a list of objects with name and template")
    return dict(pairs)


# --- files ---------------------------------------------------------------------------------------------------------


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file, empty where there is no file.  Raises `StartupError`."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(_read_text(path))
    except ValueError as error:
        raise StartupError(f"{path.name} is not JSON: {_one_line(error)}") from None
    if not isinstance(content, dict):
        raise StartupError(f"{path.name} must be a JSON object")
    return content


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"{path.name} cannot be read: {_one_line(error)}") from None


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
