"""Experiments: a run that has ended is not opened again, one that was asked for otherwise is."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from common.errors import UserError
from common.laboratory import Laboratory
from tests.train import toy


@dataclass(frozen=True)
class Toys(Laboratory):
    """Notes which runs were opened."""

    opened: list[str] = field(default_factory=list)

    def train(self, config: ConfigDict, workdir: Path) -> dict:
        self.opened.append(workdir.name)
        return toy.fit(config, toy.Toy(poison=config.seed - 100), workdir, self.mesh)


@pytest.fixture
def lab(tmp_path: Path) -> Toys:
    return Toys("tiny", 1, [], tmp_path, toy.mesh())


def test_a_run_that_has_ended_is_not_opened_again(lab: Toys) -> None:
    first, workdir = lab.fit("one", toy.config())
    again, _ = lab.fit("one", toy.config())
    assert lab.opened == ["one"] and workdir == lab.out / "runs" / "one"
    assert again == json.loads(json.dumps(first))
    # What it left is all that is needed; without that it is opened, and nothing is trained.
    (workdir / "summary.json").unlink()
    found, _ = lab.fit("one", toy.config())
    assert lab.opened == ["one"] * 2 and found["curve"] == again["curve"]


def test_another_configuration_is_refused_or_gone_on_with(lab: Toys) -> None:
    lab.fit("one", toy.config(train__steps=10))
    with pytest.raises(UserError, match="belongs to a run with another configuration: seed"):
        lab.fit("one", toy.config(train__steps=10, seed=2))
    longer, _ = lab.fit("one", toy.config(train__steps=20))
    assert longer["steps"] == 20 and lab.opened == ["one"] * 3
    assert lab.fit("one", toy.config(train__steps=20))[0]["steps"] == 20 and len(lab.opened) == 3


def test_a_run_that_was_cut_off_is_gone_on_with(lab: Toys) -> None:
    """The summary of an earlier, shorter end does not stand for it."""
    lab.fit("one", toy.config(train__steps=5, seed=110))
    with pytest.raises(UserError, match="the loss is nan"):
        lab.fit("one", toy.config(train__steps=20, seed=110))
    assert lab.fit("one", toy.config(train__steps=5, seed=110))[0]["steps"] >= 5
    assert lab.opened == ["one"] * 3
