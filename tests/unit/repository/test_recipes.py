"""The recipes of examples/recipes: scripts and files that are valid, flags and keys that their frameworks have."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve_commands import serve_commands, settings_of

RECIPES = Path(__file__).resolve().parents[3] / "examples" / "recipes"
SCRIPTS = sorted(path.relative_to(RECIPES).as_posix() for path in RECIPES.glob("*/*.sh"))
FILES = sorted(path.relative_to(RECIPES).as_posix() for path in RECIPES.glob("*/*") if path.suffix in (".sh", ".toml"))


def listed(name: str) -> set[str]:
    """Return the flags or keys of a list, without its comments."""
    lines = (RECIPES / name).read_text(encoding="utf-8").splitlines()
    return {line for line in lines if line and not line.startswith("#")}


def keys_of(table: Any, prefix: str = "") -> Iterator[str]:
    """Yield the path of each value in a TOML file, with dots."""
    for name, value in table.items():
        path = f"{prefix}{name}"
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, dict):
                yield from keys_of(part, f"{path}.")
            else:
                yield path


def flags_of(script: str) -> set[str]:
    """Return the flags in the arrays and the command of a script that calls slime."""
    arrays = "\n".join(re.findall(r"^\w+_ARGS=\((.*?)^\)", script, re.MULTILINE | re.DOTALL))
    command = script.partition("-- python3 train.py")[2]
    return set(re.findall(r"^ *(--[\w-]+)", arrays + command, re.MULTILINE))


def test_the_three_recipes_are_there() -> None:
    assert FILES == ["prime_rl/rl.toml", "prime_rl/serve.sh", "slime/serve.sh", "slime/train.sh", "verl/train.sh"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_bash_accepts_every_script(script: str) -> None:
    result = subprocess.run(["bash", "-n", str(RECIPES / script)], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("name", FILES)
def test_every_recipe_states_that_it_was_not_run(name: str) -> None:
    comment = (RECIPES / name).read_text(encoding="utf-8")[:400]
    assert "Not run." in comment
    assert "**Not run.**" in (RECIPES / name).with_name("README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["slime/serve.sh", "prime_rl/serve.sh"])
def test_the_server_has_every_flag_of_a_recipe(name: str) -> None:
    (words,) = serve_commands((RECIPES / name).read_text(encoding="utf-8"))
    settings = settings_of(words)
    assert settings.enable_return_routed_experts and settings.allow_unauthenticated


def test_a_flag_that_the_server_lacks_is_found() -> None:
    (words,) = serve_commands("exec lockstep serve m \\\n  --port 1 \\\n  --enable-multimodal\n")
    with pytest.raises(ValueError, match="--enable-multimodal"):
        settings_of(words)


def test_the_flags_for_slime_are_flags_of_slime() -> None:
    assert flags_of((RECIPES / "slime" / "train.sh").read_text(encoding="utf-8")) == listed("slime/flags.txt")


def test_the_keys_for_prime_rl_are_keys_of_prime_rl() -> None:
    content = tomllib.loads((RECIPES / "prime_rl" / "rl.toml").read_text(encoding="utf-8"))
    assert set(keys_of(content)) == listed("prime_rl/keys.txt")
    assert "inference" not in content  # prime-rl would start a server of its own


def test_addresses_and_names_of_the_two_files_for_prime_rl_agree() -> None:
    content = tomllib.loads((RECIPES / "prime_rl" / "rl.toml").read_text(encoding="utf-8"))
    script = (RECIPES / "prime_rl" / "serve.sh").read_text(encoding="utf-8")
    (words,) = serve_commands(script)
    client = content["orchestrator"]["model"]["client"]
    assert content["model"]["name"] == settings_of(words).served_model_name
    assert client["admin_base_url"] == [client["base_url"]] and "PORT:-8000" in script


def test_a_wrong_flag_or_key_is_found() -> None:
    script = "A_ARGS=(\n  --rollout-external-engine-addr x\n)\n-- python3 train.py \\\n  --colocate\n"
    assert flags_of(script) - listed("slime/flags.txt") == {"--rollout-external-engine-addr", "--colocate"}
    assert set(keys_of({"model": {"nam": 1}, "a": [{"b": 2}]})) == {"model.nam", "a.b"}
