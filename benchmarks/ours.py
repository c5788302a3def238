"""Our side of the comparisons: the project's own step, decoder and configurations on fixed random work."""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from common import sharding, variables
from common.data.windows import crop
from common.decode.beam import Search, beam_search
from common.decode.generate import Generator
from common.decode.sample import Sampling
from common.tasks import classification, language_modelling
from common.tasks.language_modelling import BYTES
from common.train.checkpoint import draw_reservoirs
from common.train.state import Step, initial_values, optimizer_shardings
from common.train.task import ModelState, PretrainedWeights, Task
from configs import explicit, language, training, translation
from explicit_opt import language as next_token
from explicit_opt.counts import Noise
from gmlp_lm.model import language_model
from perception.backbones import bert, qwen2
from perception.lora import Lora, adapt
from perception.model import PooledClassifier, backbone
from reservoir.model import translator
from reservoir.run import Translation

VOCABULARY = 10_000


def iwslt(variant: str = "none", **fields: object) -> ConfigDict:
    """IWSLT's geometry with 8 encoder layers; `variant` is a reservoir of `reservoir.model` or "none".

    With `backskip=True` every step but step 0 skips.
    """
    config = translation.iwslt(variant)
    config.model.encoder_layers = 8
    config.model.dropout = 0.0
    if fields.pop("backskip", False):
        config.model.backskip.update({"estimator": "policy", "warmup_steps": 0})
        config.model.backskip.anneal = 0.0
    config.model.update(fields)
    return config


def _translation(config: ConfigDict) -> Task:
    return Translation.Objective(config, translator, (VOCABULARY, VOCABULARY))


def random_batch(batch: int, length: int) -> dict[str, np.ndarray]:
    """Token ids without padding."""
    generator = np.random.default_rng(0)
    names = ("source", "target_inputs", "target_outputs")
    return {n: generator.integers(4, VOCABULARY, (batch, length), dtype=np.int32) for n in names}


def translation_step(config: ConfigDict, batch: int = 64, length: int = 32) -> Callable[[], float]:
    """A call makes one whole training step and returns its loss."""
    return _stepper(_translation(config), [random_batch(batch, length)])


def next_token_step(
    context: int, vocabulary: int, batch: int, tokens_M: np.ndarray
) -> Callable[[], float]:
    """The same for the next batch of a text, with concatenated inputs."""
    config = explicit.babylm("cat")
    config.model.context = context
    noise = Noise.of(np.bincount(tokens_M, minlength=vocabulary))
    windows = np.lib.stride_tricks.sliding_window_view(tokens_M, context + 1)
    batches = [
        {"contexts": part[:, :-1], "targets": part[:, -1], "weights": np.ones(batch, np.float32)}
        for part in windows[: len(windows) // batch * batch].reshape(-1, batch, context + 1)
    ]
    return _stepper(next_token.Objective(config, noise), batches)


def bytes_config(kind: str, **fields: object) -> ConfigDict:
    """Width 512, hidden 2048, 4 layers, 768 positions, no dropout, for each of the three kinds."""
    config = language.fixed(kind, "enwik8")
    config.model.update({"width": 512, "heads": 8, "hidden": 2048, "dropout": 0.0, **fields})
    config.optimizer.update({"name": "adam", "weight_decay": 0.0, "clip": 0.0})
    return config


def language_step(kind: str, dtype: str, batch: int) -> Callable[[], float]:
    """A call makes one whole training step and returns its loss."""
    return _language_step(bytes_config(kind, dtype=dtype), batch)


def laptop_step(kind: str, dtype: str) -> Callable[[], float]:
    """The same for `:fixed,laptop`, where the three models have equally many parameters."""
    config = language.choose(kind, "enwik8", "fixed,laptop")
    config.model.dtype = dtype
    return _language_step(config, config.data.batch)


def _language_step(config: ConfigDict, batch: int) -> Callable[[], float]:
    length = config.model.length
    text = np.random.default_rng(0).integers(0, BYTES, batch * (length + 1))
    crops = crop(text, np.arange(batch) * (length + 1), length)
    return _stepper(language_modelling.Objective(config, language_model), [crops])


def make_writer(kind: str, start: int, count: int) -> Callable[[], None]:
    """A call reads `start` bytes and writes the `count` likeliest bytes after them, as the sampling program does."""
    config = bytes_config(kind, dtype="float32")
    task, mesh = (
        language_modelling.Objective(config, language_model),
        sharding.make_mesh({"data": -1}),
    )
    abstract_model = variables.abstract(lambda: task.build(nnx.Rngs(0)))
    values = ModelState(
        abstract_model, initial_values(task, abstract_model, config.seed, mesh), {}, mesh
    )
    writer = Generator(abstract_model, mesh, config.model.length, Sampling(0.0))
    prompt = np.random.default_rng(0).integers(0, BYTES, start).astype(np.uint8).tobytes()

    def write() -> None:
        for _ in writer(values, prompt, count, 1):
            pass

    return write


class _Classification(classification.Objective):
    """With frozen values from the seed in place of pretrained ones."""

    def outside(self, abstract_model: variables.AbstractModel) -> PretrainedWeights:
        def make():
            model = self.build(nnx.Rngs(0))
            return {n: v.get_value() for n, v in variables.split(model).frozen.items()}

        return PretrainedWeights(jax.jit(make)(), "")


def classifier_step(
    family: str,
    sizes: tuple[int, ...],
    finetune: str,
    dtype: str,
    batch: int,
    length: int,
    classes: int,
) -> Callable[[], float]:
    """A call makes one whole training step and returns its loss."""
    *sizes, vocabulary = sizes
    if family == "bert":
        shape = bert(*sizes, vocabulary=vocabulary, dropout=(0.0, 0.0, 0.0))
    else:
        shape = qwen2(*sizes, vocabulary=vocabulary)

    def build(classes: int, *, rngs: nnx.Rngs) -> PooledClassifier:
        encoder = backbone(shape, rngs=rngs, dtype=jnp.dtype(dtype))
        if finetune == "lora":
            adapt(encoder, shape.targets, Lora(), rngs=rngs)
            variables.cast_frozen(encoder, jnp.dtype(dtype))
        return PooledClassifier(encoder, shape.width, classes, "masked", rngs=rngs)

    config = training.base("perception")
    config.optimizer.update(
        {"name": "adafactor", "learning_rate": 1e-4, "weight_decay": 1e-5, "clip": 1.0}
    )
    config.optimizer.decay = "all"  # as the peer's does
    generator = np.random.default_rng(0)
    rows = {
        "tokens": generator.integers(0, vocabulary, (batch, length), dtype=np.int32),
        "lengths": np.full(batch, length, np.int32),
        "ids": np.arange(batch, dtype=np.int32),
        "labels": generator.integers(0, classes, batch, dtype=np.int32),
    }
    return _stepper(_Classification(config, build, classes), [rows])


def _stepper(task, batches: Sequence[Mapping[str, np.ndarray]]) -> Callable[[], float]:
    """Steps of the project's loop without the loop."""
    config = task.config
    mesh = sharding.make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        step = Step.of(config, task, mesh)
        abstract_model, update = step.abstract_model, step.optimizer
        trainable = initial_values(task, abstract_model, config.seed, mesh)
        frozen, _ = draw_reservoirs(abstract_model, config.seed, mesh)
        frozen |= task.outside(abstract_model).values
        where = sharding.shardings(abstract_model.trainable, mesh)
        where = optimizer_shardings(update, trainable, where, mesh)
        opt_state = jax.jit(update.init, out_shardings=where)(trainable)
        where = sharding.batch_sharding(mesh)
        # Not step 0, which never skips.
        first = jax.device_put(batches[0], where)
        step.compile(trainable, opt_state, frozen, first, 1)
    state = [trainable, opt_state, 1]

    def run() -> float:
        """Also has `memory`: bytes that the compiled step needs besides what goes in."""
        data = jax.device_put(batches[state[2] % len(batches)], where)
        state[0], state[1], metrics = step(state[0], state[1], frozen, data, state[2])
        state[2] += 1
        return float(metrics["loss"])

    run.memory = step.compiled[step.kind(first, 1)][0].memory_analysis().temp_size_in_bytes
    return run


def make_generate(beams: int, sentences: int = 32, length: int = 32) -> Callable[[], jax.Array]:
    """A call translates fixed random sentences into exactly `length` new tokens each, in float32."""
    config = iwslt(dtype="float32")
    task = _translation(config)
    abstract_model = variables.abstract(lambda: task.build(nnx.Rngs(0)))
    mesh = sharding.make_mesh({"data": -1})
    values = initial_values(task, abstract_model, config.seed, mesh)
    source = jnp.asarray(random_batch(sentences, length)["source"])
    # The end of sentence is never generated, so every translation has the full length.
    search = Search(beams=beams, ratio=0.0, extra=length)

    @jax.jit
    def generate(values, source):
        model = abstract_model.build(values, {})
        context = model.encode(source)
        return beam_search(
            lambda last, cache, index: model.step(last, cache, index, context),
            model.cache(sentences * beams, length, context),
            jnp.full(sentences, length, jnp.int32),
            longest=length,
            search=search,
            bos=1,
            eos=2,
            never=(0, 1, 2),
        )[0]

    return lambda: jax.block_until_ready(generate(values, source))
