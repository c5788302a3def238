"""--dry-run prints memory and FLOPs without training; --profile traces steps of a run."""

from pathlib import Path

import jax
import pytest

from common.errors import UserError
from common.sharding import make_mesh
from common.train import dry_run
from common.train.loop import fit
from common.train.profile import Profile
from tests.train import toy


def test_dry_run_prints_memory_and_flops(capsys: pytest.CaptureFixture) -> None:
    dry_run.show(toy.config(train__steps=7), toy.Toy(), toy.mesh())
    shown = capsys.readouterr().out
    # The products 8 x 2 x 4 and 8 x 4 x 1, and the weight gradient of the second layer: the first layer is frozen.
    frozen, trained = 2 * 8 * 2 * 4, 2 * 8 * 4 * 1
    assert f"takes {frozen + 2 * trained:.3g} FLOPs" in shown
    assert f"7 such steps take {7 * (frozen + 2 * trained):.3g} FLOPs." in shown
    assert "8x2" in shown and "8x1" in shown
    (line,) = (line for line in shown.splitlines() if line.startswith("all"))
    assert line.split() == ["all", "5", "12", "17"]


def test_bytes_are_per_device() -> None:
    mesh = make_mesh({"data": 1, "fsdp": 2, "tensor": 4}, jax.devices())
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp", "tensor"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    sizes = [
        dry_run.held([jax.ShapeDtypeStruct((8, 16), "float32", sharding=to)])
        for to in (whole, where)
    ]
    assert sizes == [4 * 8 * 16, 4 * 8 * 16 // 8]


def test_profile_traces_the_requested_steps(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    profile = Profile.parse("3:4")
    fit(toy.config(train__steps=6), toy.Toy(), tmp_path, toy.mesh(), profile)
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    assert str(tmp_path / "profile") in capsys.readouterr().out


def test_profile_writes_its_trace_when_the_run_ends_early(tmp_path: Path) -> None:
    fit(toy.config(train__steps=6), toy.Toy(), tmp_path, toy.mesh(), Profile.parse("5:100"))
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


def test_profile_of_an_ended_run_raises_user_error(tmp_path: Path) -> None:
    config = toy.config(train__steps=2)
    fit(config, toy.Toy(), tmp_path, toy.mesh())
    with pytest.raises(UserError, match=r"--profile: the run in .* has ended, so no step can be"):
        fit(config, toy.Toy(), tmp_path, toy.mesh(), Profile.parse("1:2"))


def test_profile_of_trained_steps_raises_user_error(tmp_path: Path) -> None:
    fit(toy.config(train__steps=4), toy.Toy(), tmp_path, toy.mesh())
    with pytest.raises(UserError, match="--profile=2:3 ends before the next step of the run, 5"):
        fit(toy.config(train__steps=6), toy.Toy(), tmp_path, toy.mesh(), Profile.parse("2:3"))


def test_profile_after_the_last_step_raises_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="begins after the last step of the run, 6"):
        fit(toy.config(train__steps=6), toy.Toy(), tmp_path / "run", toy.mesh(), Profile(7, 8))
    with pytest.raises(UserError, match="after the last step of the run, 0: leave out --profile"):
        Profile(1, 2).check(0)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("given", ["3", "4:3", "0:2", "a:b", "1:", "-1:2"])
def test_malformed_profiles_raise_user_errors(given: str) -> None:
    with pytest.raises(UserError, match="FIRST:LAST"):
        Profile.parse(given)
