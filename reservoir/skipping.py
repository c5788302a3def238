"""The task mixin for backskipping. Imports `reservoir.backskip` only in runs with backskipping."""

from collections.abc import Callable, Mapping, Sequence

import jax
from flax import nnx
from ml_collections import ConfigDict

from common.model.dropout import Key


class Backskipping:
    """Mixin for a task with backskipping: adds a loss that skips the reservoirs, which needs a second compiled step."""

    config: ConfigDict
    loss: Callable

    def loss_at(self, step: int) -> Callable:
        """Returns `skipping_loss` if the step skips the reservoirs, otherwise `loss`."""
        if self.config.model.backskip.estimator == "none":
            return self.loss
        from reservoir.backskip import skips

        return self.skipping_loss if skips(self.config, step) else self.loss

    def losses(self) -> Sequence[Callable]:
        """Returns `loss`, and `skipping_loss` if the run has steps that skip the reservoirs."""
        if self.config.model.backskip.estimator == "none":
            return (self.loss,)
        from reservoir.backskip import NEVER

        skipping = self.config.model.backskip.estimator not in NEVER
        return (self.loss, self.skipping_loss) if skipping else (self.loss,)

    def skipping_loss(
        self, model: nnx.Module, batch: Mapping[str, jax.Array], key: Key
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the value of `loss`. Sets `skipping` in all `BackskipBlock`s, so gradients skip the reservoirs."""
        from reservoir.backskip import BackskipBlock

        for _, part in nnx.iter_modules(model):
            if isinstance(part, BackskipBlock):
                part.skipping = True
        return self.loss(model, batch, key)

    def learning_rate_overrides(self) -> dict[str, float]:
        """Returns {"baseline": learning rate of the parameters of value networks}; their paths contain "baseline"."""
        return {"baseline": self.config.model.backskip.value_rate}
