"""The methods of fine-tuning: which parameters are trained, and where the encoder starts.

A new method is an entry of `METHODS`, or a `Method` in a module outside this project, selected by
--config.finetune=my_package.ways:mine. Configurations import this module, so it imports JAX only inside
functions.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ml_collections import ConfigDict

from common import user_parts
from common.config import check_number, check_rate
from common.errors import check
from common.user_parts import Option

if TYPE_CHECKING:
    from flax import nnx

    from common.model.low_rank import Lora
    from perception.backbones import Backbone
    from perception.model import PooledClassifier

FINETUNE = "--config.finetune"


@dataclass(frozen=True)
class Method:
    """A method of fine-tuning.

    Attributes:
      label: name in tables and reports.
      learning_rate: learning rate if `config.optimizer.learning_rate` is 0 and `config.learning_rates` has no value for
        the method.
      change: function (config, model, shape, rngs=) that freezes parameters of `model`, a `PooledClassifier` whose
        backbone is `shape`, and may add parameters. None: all parameters are trained and stored in checkpoints.
      pretrained: whether the encoder starts from pretrained weights and uses their tokenizer and vocabulary. False:
        the encoder starts from random weights.
      options: name -> additional field of the configuration. `change` reads it as `config.NAME`.
      check: function (config) that raises a UserError if the options have invalid values.
      adapters: whether the trained parameters of the encoder are LoRA adapters with the settings `make_lora(config)`.
        `perception.adapters` can merge such adapters.
      solves_head: whether a run without training steps solves the head by logistic regression. The cache key of the
        encoder's features does not depend on `change`, so `change` must not change the encoder's output. Only the
        method "head" may set this attribute.
    """

    label: str
    learning_rate: float
    change: "Callable[..., None] | None" = None
    pretrained: bool = True
    options: Mapping[str, Option] = field(default_factory=dict)
    check: Callable[[ConfigDict], None] = lambda config: None
    adapters: bool = False
    solves_head: bool = False

    @property
    def trains_all(self) -> bool:
        return self.change is None


def words(text: str) -> list[str]:
    """Splits a list of names at commas and white space."""
    return text.replace(",", " ").split()


def make_lora(config: ConfigDict) -> "Lora":
    from common.model.low_rank import Lora

    lora = config.lora
    return Lora(lora.rank, lora.alpha or lora.rank, lora.dropout, lora.stabilized)


def _lora(
    config: ConfigDict, model: "PooledClassifier", shape: "Backbone", *, rngs: "nnx.Rngs"
) -> None:
    """Freezes the encoder. Adds LoRA adapters to the layers named in `config.lora.targets`, by default `shape.targets`.

    `config.freeze_head` freezes the head at its initial values, like the authors' program.
    """
    from common.freezing import freeze
    from common.model.low_rank import adapt, is_target, linear_layers

    targets, layers = words(config.lora.targets) or shape.targets, linear_layers(model.encoder)
    for target in targets:
        check(
            any(is_target(path, target) for path in layers),
            f"--config.lora.targets={config.lora.targets}: {target!r} matches no layer of the backbone; choose among"
            f" {', '.join(dict.fromkeys(path[-1] for path in layers))}",
        )
    adapt(model.encoder, targets, make_lora(config), rngs=rngs)
    if config.freeze_head:
        freeze(model.head)
        for variable in (model.head.kernel, model.head.bias):
            variable.set_metadata(draw=("uniform", (2 * shape.width) ** -0.5))


def _head(
    config: ConfigDict, model: "PooledClassifier", shape: "Backbone", *, rngs: "nnx.Rngs"
) -> None:
    from common.freezing import freeze_loaded

    freeze_loaded(model.encoder)


METHODS = {
    "full": Method("all weights, from random ones", 1e-4, pretrained=False),
    "full_pretrained": Method("all weights, from pretrained ones", 1e-4),
    "lora": Method(
        "LoRA on pretrained weights",
        1e-3,
        _lora,
        options={
            "lora.rank": Option(32, minimum=1),
            "lora.alpha": Option(0.0, minimum=0),  # 0 means alpha = rank
            "lora.dropout": Option(0.05),
            "lora.stabilized": Option(False),
            "lora.targets": Option(""),
            "freeze_head": Option(False),
        },
        check=lambda config: check_rate("--config.lora.dropout", config.lora.dropout),
        adapters=True,
    ),
    "head": Method("the head alone, on pretrained weights", 1e-2, _head, solves_head=True),
}


def find(name: str, option: str = FINETUNE) -> Method:
    """Returns the method named `name`: a key of `METHODS`, or "module:attribute" for a user's method.

    Args:
      option: command-line option that names the method, for error messages.

    Raises:
      UserError: the method is unknown, cannot be imported, or is not a `Method` with valid fields.
    """
    method = user_parts.find(option, name, Method, METHODS)
    check(
        method.change is None or callable(method.change),
        f"{option}={name}: the field change must be a function or None, got {method.change!r}",
    )
    check_number(f"{option}={name}: the field learning_rate", method.learning_rate, positive=True)
    check(
        name in METHODS or not method.solves_head,
        f"{option}={name}: only the method head can have solves_head=True: remove solves_head, or use {option}=head",
    )
    return method
