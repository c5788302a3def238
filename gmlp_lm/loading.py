"""Loads a trained language model, and continues texts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.config import check_int, check_seed, complete
from common.data import lossless
from common.data.lossless_tokenizer import LosslessTokenizer
from common.decode.generate import Generator
from common.decode.sample import Sampling
from common.errors import check
from common.sharding import make_mesh
from common.storage.addresses import shown
from common.storage.folders import open_folder
from common.train import restore
from common.train.task import ModelState
from common.train.workdir import CONFIG
from gmlp_lm import model


@dataclass(frozen=True)
class TrainedRun:
    """A trained language model. Keeps the compiled programs of the last `Sampling`."""

    config: ConfigDict
    tokenizer: LosslessTokenizer
    values: ModelState
    mesh: Mesh
    _generators: dict[Sampling, Generator] = field(default_factory=dict)

    def sample(
        self,
        prompt: str = "\n",
        *,
        samples: int = 1,
        length: int = 512,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 1,
    ) -> list[str]:
        """Returns `samples` continuations of `prompt`, each of `length` bytes, or subwords if the run has subwords.

        For the other arguments, see `Sampling`. Raises a UserError if an argument is invalid.
        """
        check(
            isinstance(prompt, str) and prompt != "", f"prompt must be a text, got {prompt!r:.80}"
        )
        check_int("samples", samples)
        check_int("length", length)
        check_seed("seed", seed)
        sampling = Sampling(temperature, top_k, top_p)
        sampling.validate()
        chunks = self.pieces([prompt.encode()] * samples, length, sampling, seed)
        return [b"".join(text).decode(errors="replace") for text in zip(*chunks, strict=True)]

    def pieces(
        self, prompts: Sequence[bytes], length: int, sampling: Sampling, seed: int
    ) -> Iterator[Iterator[bytes]]:
        """Returns an iterator over the next pieces of all continuations; see `Generator.__call__`."""
        if sampling not in self._generators:
            self._generators.clear()
            model, window = self.values.abstract_model, self.config.model.length
            self._generators[sampling] = Generator(model, self.mesh, window, sampling)
        tokens = [self.tokenizer.encode(prompt) for prompt in prompts]
        generated = self._generators[sampling](self.values, tokens, length, seed)
        return (map(self.tokenizer.decode, rows) for rows in generated)


def load_run(folder: str | Path, *, mesh: Mesh | None = None, option: str = "folder") -> TrainedRun:
    """Loads the best checkpoint of a run.

    `mesh` is by default a mesh of all devices. `option` names `folder` in error messages. Raises a UserError if the
    folder has no run of this paper, no checkpoint, or a damaged file.
    """
    workdir, mesh = open_folder(folder), mesh or make_mesh({"data": -1})
    config = restore.read_config(workdir, option, "gmlp_lm")
    with complete(shown(workdir / CONFIG)):
        model.validate(config.model)
    tokenizer = lossless.in_run(workdir)
    build = lambda rngs: model.language_model(config.model, tokenizer.size, rngs=rngs)  # noqa: E731
    return TrainedRun(config, tokenizer, restore.load_run(workdir, config, build, mesh), mesh)
