"""Fine-tunes a masked language model as a classifier (section 4.3)."""

from pathlib import Path

from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.config import check, check_choice, check_rate, complete
from common.errors import UserError
from common.model.classifier import Classifier
from common.tasks import classification
from common.tasks.classification import Build, Classification
from common.tasks.masked_lm import vocabulary
from common.train import loop
from common.train.checkpoint import check_snapshot
from common.variables import Params
from reservoir import encoder
from reservoir.placement import placement
from reservoir.pretrained import Pretrained, open_run


def validate(config: ConfigDict) -> None:
    """Checks the fields of the configuration, without the pretraining run and the data.

    Raises:
      UserError: a field is missing or out of range.
    """
    with complete("--config"):
        check(
            config.task == "classification",
            f"--config.task={config.task!r} is no fine-tuning task; train it with reservoir.train",
        )
        check(
            bool(config.pretrained),
            "--config.pretrained is empty; set it to the run folder of a masked language model",
        )
        check(
            config.pretrained_step >= 0,
            f"--config.pretrained_step must be at least 0, got {config.pretrained_step}",
        )
        check_choice("--config.reservoirs", config.reservoirs, encoder.FINE_TUNING_MODES)
        for name in ("dropout", "attention_dropout", "head_dropout"):
            check_rate(f"--config.model.{name}", config.model[name])
        check_choice("--config.model.dtype", config.model.dtype, ("auto", "float32", "bfloat16"))
        classification.validate(config)
        loop.validate(config)


def complete_model(config: ConfigDict, pretrained: Pretrained) -> ConfigDict:
    """Returns a copy with the model of the pretraining run, see `inherit`.

    Raises:
      UserError: `config.reservoirs` does not fit the run, or the run lacks the snapshot `config.pretrained_step`.
    """
    model, mode = pretrained.config.model, config.reservoirs
    option = f"--config.reservoirs={mode}"
    if config.pretrained_step:
        check_snapshot(pretrained.workdir, config.pretrained_step)
    plain = model.reservoir == "none" or model.reservoir_trained
    check(
        mode != "tune" or not plain,
        f"{option}: {pretrained.workdir} has no reservoirs to tune; use --config.reservoirs=keep",
    )
    if mode == "freeze_now":
        check(
            plain,
            f"{option} needs a plain run; {pretrained.workdir} has --config.model.reservoir={model.reservoir}",
        )
        try:
            chosen = placement(model.encoder_layers, config.freeze_now)
        except ValueError as error:
            raise UserError(f"--config.freeze_now: {error}") from error
        check(bool(chosen), f"{option} freezes nothing: --config.freeze_now={config.freeze_now}")
    return inherit(config, model)


def inherit(config: ConfigDict, model: ConfigDict) -> ConfigDict:
    """Returns a copy with `model` of a pretraining run, overridden by the model fields of fine-tuning."""
    config = config.copy_and_resolve_references()
    config.model = ConfigDict({**model.to_dict(), **config.model.to_dict()})
    if model.backskip.estimator != "none":
        # Keeps the layers but builds no value network: fine-tuning differentiates every layer.
        config.model.backskip.estimator = "identity"
    return config


def builder(config: ConfigDict, pretrained: Pretrained) -> Build:
    """Returns a function (number of classes, rngs=) -> classifier."""

    def build(classes: int, *, rngs: nnx.Rngs) -> Classifier:
        return encoder.classifier(
            config.model,
            vocabulary(pretrained.tokenizer),
            classes,
            rngs=rngs,
            reservoirs=config.reservoirs,
            freeze_now=config.freeze_now,
        )

    return build


def make_task(
    config: ConfigDict, pretrained: Pretrained, mesh: Mesh, read_data: bool = True
) -> Classification:
    """The task, whose encoder starts at the values of the pretraining run. Without data it has two classes."""

    def start(trainable: Params) -> Params:
        values = pretrained.load(mesh, config.pretrained_step)
        found = {**values.trainable, **values.frozen}
        return trainable | {n: x for n, x in found.items() if n.startswith("encoder/")}

    build, longest = builder(config, pretrained), config.model.max_length
    options = {"longest": longest, "start": start, "classes": None if read_data else 2}
    return Classification(config, pretrained.tokenizer, build, mesh, **options)


def prepare(
    config: ConfigDict, mesh: Mesh, read_data: bool = True
) -> tuple[ConfigDict, Classification]:
    """Returns the configuration for the training loop, and the task. `read_data` False builds a task without data.

    Raises:
      UserError: the configuration, the data or the pretraining run is invalid.
    """
    validate(config)
    pretrained = open_run(Path(config.pretrained), "--config.pretrained")
    config = complete_model(config, pretrained)
    return config, make_task(config, pretrained, mesh, read_data)


def fit(config: ConfigDict, workdir: Path, mesh: Mesh) -> dict:
    """Trains or resumes the run in `workdir`; returns its summary. Raises the errors of `loop.fit`."""
    return loop.fit(*prepare(config, mesh), workdir, mesh)
