"""Opens the pretrained model of a run, and loads the model's weights into the parameters of the run."""

from collections.abc import Callable

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.runtime.processes import check_agreement
from common.storage.addresses import shown
from common.storage.folders import open_folder
from common.train.task import NO_PRETRAINED_WEIGHTS, PretrainedWeights
from common.variables import AbstractModel, Params
from perception.backbones import BACKBONES
from perception.finetuning import ENCODER, encoder_parameters, reinitialized, uses_pretrained
from perception.hugging_face import Pretrained, check_shape, open_model
from perception.methods import find
from perception.quantized import load_frozen


def open_pretrained(
    config: ConfigDict,
    option: str = "--config.pretrained",
    advice: str = "",
    other: str = "set --config.backbone=auto, or choose other weights",
) -> Pretrained | None:
    """Opens the pretrained model that gives the run its weights or architecture.

    Returns None if the run trains a named backbone from random weights.

    Args:
      option: command-line option that names the model, for error messages.
      advice: text appended to the error if the directory is missing or not readable.
      other: advice in the error for a model with another backbone.

    Raises:
      UserError: the model is missing, damaged or not supported, or its backbone is not `config.backbone`.
    """
    if not uses_pretrained(config):
        return None
    folder = open_folder(config.pretrained)
    found = open_model(folder, option, advice)
    if config.backbone != "auto":
        model = f"{option}={shown(folder)}"
        check_shape(model, config.backbone, BACKBONES[config.backbone], found.shape, other)
    return found


def start(config: ConfigDict, pretrained: Pretrained, trainable: Params) -> Params:
    """Implements `Task.start`.

    Replaces the trained parameters of the encoder by their pretrained values, except reinitialised embedding tables and
    parameters that the method adds. If the method starts from random weights or trains adapters, returns `trainable`
    unchanged.
    """
    method = find(config.finetune)
    if not method.pretrained or method.adapters:
        return trainable
    trained = {
        name.removeprefix(ENCODER): jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        for name, x in trainable.items()
        if name.startswith(ENCODER)
    }
    # A method that trains only some weights may have added parameters, which the pretrained model lacks.
    added = trained and not method.trains_all
    known = encoder_parameters(pretrained.shape) if added else trained
    drawn = reinitialized(config, pretrained.shape.family)
    wanted = {n: x for n, x in trained.items() if n in known and n not in drawn}
    if not wanted:
        return trainable
    check_agreement(
        lambda: {"the fingerprint of the pretrained weights": pretrained.fingerprint[:16]}
    )
    return {**trainable, **{ENCODER + n: x for n, x in pretrained.load(wanted).items()}}


def pretrained_weights(
    pretrained: Pretrained | None, mesh: Mesh
) -> Callable[[AbstractModel], PretrainedWeights]:
    """Returns the implementation of `Task.pretrained_weights`.

    The returned function reads the frozen parameters from the pretrained model's files, except the frozen parameters
    that are initialised from the seed.
    """

    def read(abstract_model: AbstractModel) -> PretrainedWeights:
        drawn = abstract_model.seed_initialised
        frozen = {
            n.removeprefix(ENCODER): v for n, v in abstract_model.frozen.items() if n not in drawn
        }
        if not frozen:
            return NO_PRETRAINED_WEIGHTS
        values = load_frozen(pretrained.load, frozen, mesh)
        return PretrainedWeights(
            {ENCODER + n: x for n, x in values.items()}, pretrained.fingerprint
        )

    return read
