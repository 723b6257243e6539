"""Names of models, and the way to one that is not here."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.core.args.hub import model_name, objection_to_folder
from rollout.core.args.server_args import ServerArgs
from rollout.server import serve

NAME = "Qwen/Qwen3-30B-A3B"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of Hugging Face."""
    for variable in ("HF_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def snapshot(cache: Path) -> Path:
    folder = cache / "models--Qwen--Qwen3-30B-A3B"
    path = folder / "snapshots" / "0123abc"
    path.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0123abc")
    return path


def test_a_hub_name_gets_the_command_that_downloads_it_n13(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """N13: it got the command that writes a random checkpoint."""
    assert serve.main([NAME]) == 1
    assert capsys.readouterr().err == (
        f"lockstep: error: --model-path {NAME} is not a folder, and not in the cache of Hugging Face. "
        f"Download it with: hf download {NAME} --local-dir Qwen3-30B-A3B && lockstep serve Qwen3-30B-A3B\n"
    )


def test_a_hub_name_in_the_cache_gets_its_path(cache: Path) -> None:
    path = snapshot(cache)
    assert "hf download" in str(objection_to_folder(NAME)), "a snapshot without config.json is no model"
    (path / "config.json").write_text("{}")
    objection = objection_to_folder(NAME)
    assert objection is not None and objection.endswith(f"give that path: {path}")
    assert objection_to_folder(str(path)) is None
    assert model_name(str(path)) == NAME


def test_a_user_without_a_home_folder_has_no_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for variable in ("HOME", "HF_HOME"):
        monkeypatch.delenv(variable, raising=False)
    assert "Download it with" in str(objection_to_folder(NAME))


def test_other_paths_get_their_own_way(cache: Path) -> None:
    Path("file").write_text("")
    assert str(objection_to_folder("file")).startswith("file is a file, and not a folder")
    assert str(objection_to_folder("./a/b")).endswith("lockstep make-checkpoint DIR")
    Path("Qwen/Qwen3-30B-A3B").mkdir(parents=True)
    assert objection_to_folder(NAME) is None


def test_a_model_is_named_as_its_folder_n15(cache: Path) -> None:
    """N15: the id in /v1/models was `./checkpoint`."""
    Path("checkpoint").mkdir()
    Path("latest").symlink_to("checkpoint")
    assert model_name("./checkpoint") == model_name("checkpoint/") == "checkpoint"
    assert model_name("/models/Qwen3-30B-A3B") == "Qwen3-30B-A3B"
    assert model_name(".") == cache.parent.name and model_name("latest") == "latest"


def test_the_path_stays_a_name_unless_another_is_given() -> None:
    assert ServerArgs(model_path="./checkpoint").names == ("checkpoint", "./checkpoint")
    assert ServerArgs(model_path="checkpoint").names == ("checkpoint",)
    assert ServerArgs(model_path="./checkpoint", served_model_name="policy").names == ("policy",)
