"""A finished masked language model, to be probed or fine-tuned."""

import dataclasses
from pathlib import Path

from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.config import complete
from common.data.tokenizer import Tokenizer
from common.tasks import masked_lm
from common.tasks.masked_lm import TOKENIZER, vocabulary
from common.train.restore import load_run
from common.train.task import ModelState
from common.train.workdir import CONFIG, read_run
from reservoir import encoder, model


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """What a run is made of; `load` reads its values."""

    workdir: Path
    config: ConfigDict
    tokenizer: Tokenizer

    def load(self, mesh: Mesh, step: int = 0) -> ModelState:
        """The values of a `MaskedLanguageModel`, reservoirs drawn again from the seed of this run.

        Args:
          step: that of a snapshot; 0 is the best checkpoint.

        Raises:
          UserError: there is no such checkpoint, it is damaged, or it does not fit the configuration beside it.
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
    """The masked language model in `workdir`, which `option` of a command line names.

    Raises:
      UserError: there is no run, it is of another task, or its tokenizer is missing.
    """
    config = read_run(workdir, "masked_lm", option)
    with complete(workdir / CONFIG):
        config.model = model.with_defaults(config.model)
        model.validate(config.model)
        masked_lm.validate(config)
    return Pretrained(workdir, config, Tokenizer.load(workdir / TOKENIZER))
