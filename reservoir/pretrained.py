"""Opens a trained masked language model, for probing and fine-tuning."""

import dataclasses
from pathlib import Path

from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.data.cache import fingerprint
from common.data.tokenizer import Tokenizer
from common.track.tracker import SUMMARY
from common.train.restore import load_run
from common.train.task import ModelState
from common.train.workdir import CONFIG
from reservoir import encoder, saved
from reservoir.tasks.masked_lm import TOKENIZER, vocabulary


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A pretraining run. `load` reads the parameters of the run."""

    workdir: Path
    config: ConfigDict
    tokenizer: Tokenizer

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the run's configuration and results. It changes with the seed and the data of the run."""
        files = (self.workdir / CONFIG, self.workdir / SUMMARY)
        return fingerprint([path.read_text() if path.exists() else "" for path in files])

    def load(self, mesh: Mesh, step: int = 0) -> ModelState:
        """Returns the parameters of the `MaskedLanguageModel`, both trained and frozen.

        Args:
          step: step of a snapshot; 0 is the best checkpoint.

        Raises:
          UserError: the checkpoint is missing or damaged, or does not fit the run's configuration.
        """
        size = vocabulary(self.tokenizer)
        return load_run(
            self.workdir,
            self.config,
            lambda rngs: encoder.masked_lm(self.config.model, size, rngs=rngs),
            mesh,
            snapshots=(step,) if step else (),
        )


def open_run(workdir: Path, option: str = "--workdir") -> Pretrained:
    """Opens the masked language model in `workdir`.

    Args:
      option: the command-line option of `workdir`, for error messages.

    Raises:
      UserError: the folder has no run, or the run has another task, an invalid configuration, or no readable tokenizer.
    """
    config = saved.read(workdir, option, "masked_lm")
    return Pretrained(workdir, config, Tokenizer.load(workdir / TOKENIZER))
