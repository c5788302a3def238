"""Models selected by hub name: layout of the local Hugging Face cache, and no network access without --download."""

import json
import sys
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import constants

from common.errors import UserError
from configs import perception
from perception import hub, train, worth
from perception.adapter_commands import _folder
from perception.hugging_face import open_model
from perception.safetensor_files import INDEX, WHOLE
from tests.perception.helpers import golden_json, write_folder

COMMIT, OLDER = "a" * 40, "b" * 40


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """Writes a cache with the model "org/model" and returns the folder of the model.

    Weights are stored as blobs. The branch "main" and the tag "v1" name commits. Network access fails the test.
    """
    folder = tmp_path / "hub"
    model = folder / "models--org--model"
    for reference, commit in {"main": COMMIT, "v1": OLDER}.items():
        config, shapes = (golden_json(f"bert/{name}") for name in ("config", "shapes"))
        snapshot = write_folder(model / "snapshots" / commit, config, shapes)
        (model / "blobs").mkdir(exist_ok=True)
        blob = (snapshot / WHOLE).rename(model / "blobs" / f"{commit}-weights")
        (snapshot / WHOLE).symlink_to(blob)
        (model / "refs").mkdir(exist_ok=True)
        (model / "refs" / reference).write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("used the network"))
    return model


def test_hub_name_is_found_in_the_cache(cache) -> None:
    model = open_model(Path("org/model"))
    assert model.directory == cache / "snapshots" / COMMIT
    assert model.files.shape("embeddings.word_embeddings.weight") == (50, 32)


@pytest.mark.parametrize(("name", "commit"), [("v1", OLDER), ("main", COMMIT), (OLDER, OLDER)])
def test_revision_is_a_branch_tag_or_commit(name: str, commit: str, cache) -> None:
    assert hub.locate(Path(f"org/model@{name}")) == cache / "snapshots" / commit


def test_directory_takes_precedence_over_the_cache(cache, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("org/model").mkdir(parents=True)
    assert hub.locate(Path("org/model")) == Path("org/model")


@pytest.mark.parametrize("name", ["org/other", "org/model@v2", "org/model@refs/pr/1", "model"])
def test_unknown_name_raises_error_that_names_cache_and_option(name: str, cache) -> None:
    advice = "with --download of perception.train or perception.worth, or give"
    with pytest.raises(UserError, match=f"^--x={name} is not a readable directory; the.*{advice}"):
        hub.locate(Path(name), "--x")


@pytest.mark.parametrize("name", ["a/b/c", "../model", "-", "/no", "~nobody_here/model"])
def test_path_is_not_looked_up_as_a_hub_name(name: str, cache) -> None:
    message = rf"^--x={name} is not a readable directory: give the directory of"
    with pytest.raises(UserError, match=message):
        hub.locate(Path(name), "--x")


def test_directory_without_permission_raises_error(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    monkeypatch.setattr(Path, "is_dir", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(UserError, match=rf"^--x={tmp_path} is not a readable directory: give"):
        hub.locate(tmp_path, "--x")


def test_incomplete_snapshot_raises_error_with_the_missing_file(cache) -> None:
    (cache / "snapshots" / COMMIT / WHOLE).unlink()
    with pytest.raises(UserError, match=f"has neither {WHOLE} nor {INDEX}"):
        open_model(Path("org/model"))


def test_base_model_of_an_adapter_is_found_by_its_hub_name(cache) -> None:
    assert _folder("org/model") == cache / "snapshots" / COMMIT
    assert _folder("org/other") is None and _folder("") is None


def test_sharded_model_equals_whole_model(cache, tmp_path) -> None:
    """Shards written by other programs are read: here, each shard has every third tensor.

    This project itself fills one shard after another.
    """
    from safetensors.numpy import load_file, save_file

    snapshot = cache / "snapshots" / COMMIT
    whole = load_file(snapshot / WHOLE)
    places = {name: f"part-{i % 3}.safetensors" for i, name in enumerate(sorted(whole))}
    for file in set(places.values()):
        save_file({n: x for n, x in whole.items() if places[n] == file}, snapshot / file)
    (snapshot / WHOLE).unlink()
    (snapshot / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    files = open_model(Path("org/model")).files
    assert files.names == whole.keys()
    for name, value in whole.items():
        np.testing.assert_array_equal(files.read(name, (slice(None),)), value)


@pytest.mark.parametrize(
    ("program", "training"),
    [(train, "perception.run.ended"), (worth, "perception.comparison.worth")],
)
def test_download_needs_its_option_and_skips_pickles(
    program, training, cache, tmp_path, monkeypatch
) -> None:
    """With --download, the program calls the hub once, before training. The file patterns exclude pickles."""
    asked = []

    def snapshot_download(name: str, **options: object) -> str:
        asked.append((name, options["revision"]))
        assert not any(p.endswith((".bin", ".pt", "*")) for p in options["allow_patterns"])
        return str(cache / "snapshots" / COMMIT)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)

    def begin(*_: object) -> None:
        raise UserError("training begins")

    monkeypatch.setattr(training, begin)
    monkeypatch.chdir(tmp_path)
    arguments = [f"--config={perception.__file__}:tiny", "--config.pretrained=org/model@v1"]
    for extra, wanted in ([], []), (["--download"], [("org/model", "v1")]):
        monkeypatch.setattr(sys, "argv", ["program", *arguments, *extra])
        with pytest.raises(UserError, match="training begins"):
            program.main()
        assert asked == wanted


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionError("no\nnetwork"), "no network; check the name, "),
        (ConnectionError(), "ConnectionError; check the name, "),
        (OSError(28, "No space left on device"), ".*; check .* space and permissions of the"),
    ],
)
def test_failed_download_raises_one_line(cache, monkeypatch, error, reason) -> None:
    def snapshot_download(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(UserError, match=f"^--download cannot fetch org/other: {reason}"):
        hub.download("org/other")
