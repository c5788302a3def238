"""This project's training steps and decoders on fixed random data, for benchmarks."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common import sharding, variables
from common.data.windows import crop
from common.decode.generate import Generator
from common.decode.sample import Sampling
from common.model.layers import stack_layers
from common.model.loss import cross_entropy
from common.model.low_rank import Lora, adapt
from common.tasks.classification import Classification
from common.train.frozen import draw_on_mesh
from common.train.state import Step, initial_params
from common.train.task import ModelState, PretrainedWeights, Task
from configs import explicit, language, perception, translation
from explicit_opt import language as next_token
from explicit_opt.counts import Noise
from gmlp_lm import run as gmlp_lm
from launch.products import Product, read_products
from perception.backbones import bert, qwen2
from perception.finetuning import cast_frozen
from perception.model import PooledClassifier, backbone
from reservoir.beam import Search, beam_search
from reservoir.tasks.translation import Translation

VOCABULARY = 10_000
SENTENCES = 32  # source sentences in a decoder's batch
LENGTH = 32  # tokens of each source or target sentence, in training and decoding
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}  # {name in HLO: dtype}
CHUNK = 16  # tokens of each row that the generator draws per call of its compiled program


def iwslt(variant: str = "none", **fields: object) -> ConfigDict:
    """Returns the configuration of IWSLT, with 8 encoder layers and dropout rate 0 unless `fields` overrides them.

    Args:
      variant: a key of `reservoir.kinds.RESERVOIRS`, or "none".
      fields: model fields to override. `backskip=True` makes every step except step 0 a skipping step.
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
    config.data.vocab_size = VOCABULARY
    return Translation(config, sharding.make_mesh(config.mesh), read_data=False)


def random_batch(batch: int) -> dict[str, np.ndarray]:
    """Returns "source", "target_inputs" and "target_outputs": random token ids (batch, LENGTH), without padding."""
    generator = np.random.default_rng(0)
    names = ("source", "target_inputs", "target_outputs")
    return {n: generator.integers(4, VOCABULARY, (batch, LENGTH), dtype=np.int32) for n in names}


def translation_step(config: ConfigDict, batch: int = 64) -> Callable[[], float]:
    """Returns a function that runs a training step of a translation model on random tokens and returns the loss."""
    return _stepper(_translation(config), [random_batch(batch)])


def next_token_step(
    context: int, vocabulary: int, batch: int, tokens_L: np.ndarray
) -> Callable[[], float]:
    """Returns a function that runs a training step of explicit_opt's language model and returns the loss.

    Each call uses the next batch of `tokens_L`. The model reads the concatenated embeddings of `context` tokens.
    """
    config = explicit.babylm("cat")
    config.model.context = context
    noise = Noise.of(np.bincount(tokens_L, minlength=vocabulary))
    windows = np.lib.stride_tricks.sliding_window_view(tokens_L, context + 1)
    batches = [
        {"contexts": part[:, :-1], "targets": part[:, -1], "weights": np.ones(batch, np.float32)}
        for part in windows[: len(windows) // batch * batch].reshape(-1, batch, context + 1)
    ]
    task = next_token.NextToken(config, sharding.make_mesh(config.mesh), read_data=False)
    task.noise = noise
    return _stepper(task, batches)


def bytes_config(kind: str, dtype: str) -> ConfigDict:
    """Returns the configuration of a byte language model: width 512, hidden size 2048, 4 layers, 768 positions."""
    config = language.fixed(kind, "enwik8")
    config.model.update({"width": 512, "heads": 8, "hidden": 2048, "dtype": dtype})
    config.optimizer.update({"name": "adam", "weight_decay": 0.0, "clip": 0.0})
    return config


def language_step(kind: str, dtype: str, batch: int) -> Callable[[], float]:
    """Returns a function that runs a training step of a byte language model and returns the loss."""
    return bytes_step(bytes_config(kind, dtype), batch)


def bytes_step(config: ConfigDict, batch: int) -> Callable[[], float]:
    """Returns a function that runs a training step on `batch` random rows of bytes and returns the loss."""
    length = config.model.length
    text = np.random.default_rng(0).integers(0, 256, batch * (length + 1))
    crops = crop(text, np.arange(batch) * (length + 1), length)
    task = gmlp_lm.Task(config, sharding.make_mesh(config.mesh), read_data=False)
    return _stepper(task, [crops])


def make_writer(kind: str, start: int, count: int) -> Callable[[], None]:
    """Returns a function that prefills `start` bytes and generates `count` bytes greedily.

    Its attribute `products` is a function that returns {matrix product: executions in one call}, without the prefill.
    """
    config = bytes_config(kind, "float32")
    mesh = sharding.make_mesh(config.mesh)
    task = gmlp_lm.Task(config, mesh, read_data=False)
    abstract_model = variables.abstract(task.build)
    values = ModelState(
        abstract_model, initial_params(task, abstract_model, config.seed, mesh), {}, mesh
    )
    chunks = -(-(start + count) // CHUNK)
    writer = Generator(abstract_model, mesh, chunks * CHUNK, Sampling(0.0))
    prompt = np.random.default_rng(0).integers(0, 256, start)

    def write() -> None:
        for _ in writer(values, [prompt], count, 1, chunk=CHUNK):
            pass

    def products() -> Counter[Product]:
        decoding = writer.decoding(1, CHUNK)
        lowered = decoding.program.lower(*abstract_model.shapes(), *decoding.inputs)
        chunk = read_products(lowered.compile().as_text())
        return Counter({x: n * -(-count // CHUNK) for x, n in chunk.items()})

    write.products = products
    return write


class _Classification(Classification):
    """The task of a text classifier without data, whose frozen parameters are random instead of pretrained."""

    objective = "accuracy"

    def __init__(self, config: ConfigDict, build: Callable, mesh: Mesh, **options: int):
        super().__init__(config, None, mesh, **options)
        self._build = build

    def build(self, rngs: nnx.Rngs) -> PooledClassifier:
        return self._build(self._class_count, rngs=rngs)

    def loss(self, model, batch, key) -> tuple[jax.Array, jax.Array]:
        logits_BC = model(batch["tokens"], batch["lengths"], key)
        loss_B = cross_entropy(logits_BC, batch["labels"]) * (batch["ids"] >= 0)
        return jnp.sum(loss_B), jnp.sum(batch["ids"] >= 0, dtype=jnp.float32)

    def pretrained_weights(self, abstract_model: variables.AbstractModel) -> PretrainedWeights:
        def make():
            model = self.build(nnx.Rngs(0))
            return {n: v.get_value() for n, v in variables.split(model).frozen.items()}

        return PretrainedWeights(jax.jit(make)(), "")

    def evaluate(self, values: ModelState, split: str) -> dict[str, float | str]:
        raise NotImplementedError("this task has no data to evaluate")


def classifier_step(
    family: str,
    sizes: tuple[int, ...],
    finetune: str,
    dtype: str,
    batch: int,
    length: int,
    classes: int,
    optimizer: str = "adafactor",
) -> Callable[[], float]:
    """Returns a function that runs a training step of a text classifier and returns the loss.

    Args:
      family, sizes: a key of `benchmarks.lora.SIZES`, and sizes in the order of its values.
      finetune: "full" or "lora".
      optimizer: "adafactor", or "adamw" with PyTorch's epsilon.
    """
    *sizes, vocabulary = sizes
    shape = replace((bert if family == "bert" else qwen2)(*sizes), vocabulary=vocabulary)

    def build(classes: int, *, rngs: nnx.Rngs) -> PooledClassifier:
        encoder = backbone(shape, rngs=rngs, dtype=jnp.dtype(dtype))
        if finetune == "lora":
            adapt(encoder, shape.targets, Lora(), rngs=rngs)
            cast_frozen(encoder, jnp.dtype(dtype))
        return PooledClassifier(encoder, shape.width, classes, "masked", rngs=rngs)

    config = perception.get_config()
    config.optimizer.learning_rate = 1e-4
    if optimizer == "adamw":
        config.optimizer.update({"name": "adamw", "epsilon": 1e-8})
    generator = np.random.default_rng(0)
    rows = {
        "tokens": generator.integers(0, vocabulary, (batch, length), dtype=np.int32),
        "lengths": np.full(batch, length, np.int32),
        "ids": np.arange(batch, dtype=np.int32),
        "labels": generator.integers(0, classes, batch, dtype=np.int32),
    }
    mesh = sharding.make_mesh(config.mesh)
    task = _Classification(config, build, mesh, longest=length, classes=classes)
    return _stepper(task, [rows])


def _stepper(task, batches: Sequence[Mapping[str, np.ndarray]]) -> Callable[..., float]:
    """Returns a function that runs `steps` training steps (default: 1) on successive batches and returns the last loss.

    The function waits for the device only after the last step, so steps are dispatched as in the training loop.

    The function has attributes `memory`, the bytes of temporary memory of the compiled step; `flops`, the model FLOPs
    of a step (`common.train.flops`); and `products`, a function that returns {matrix product: executions in a step}.
    """
    config = task.config
    mesh = sharding.make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        step = Step.of(config, task, mesh)
        abstract_model, state = step.abstract_model, step.start()
        frozen, _ = draw_on_mesh(abstract_model, config.seed, mesh)
        frozen |= task.pretrained_weights(abstract_model).values
        frozen = stack_layers(frozen, step.scanned.frozen)
        where = sharding.batch_sharding(mesh)
        # Compile step 1, because step 0 is never a skipping step of backskipping.
        first = jax.device_put(batches[0], where)
        state.step = 1
        step.compile(first, state.step)

    def run(steps: int = 1) -> float:
        for _ in range(steps):
            data = jax.device_put(batches[state.step % len(batches)], where)
            metrics = step(state, frozen, data)
        return float(metrics["loss"])

    compiled, run.flops = step.compiled[step.cache_key(first, 1)]
    run.memory = compiled.memory_analysis().temp_size_in_bytes
    run.products = lambda: read_products(compiled.as_text())
    return run


def make_generate(beams: int) -> Callable[[], None]:
    """Returns a function that translates random sentences into exactly LENGTH tokens each, in float32.

    Its attribute `products` is a function that returns {matrix product: executions in one call}.
    """
    config = iwslt(dtype="float32")
    task = _translation(config)
    abstract_model = variables.abstract(task.build)
    mesh = sharding.make_mesh({"data": -1})
    values = initial_params(task, abstract_model, config.seed, mesh)
    source = jnp.asarray(random_batch(SENTENCES)["source"])
    search = Search(beams=beams, ratio=0.0, extra=LENGTH)

    @jax.jit
    def generate(values, source):
        model = abstract_model.build(values, {})
        context = model.encode(source)
        return beam_search(
            lambda last, cache, index: model.step(last, cache, index, context),
            model.cache(SENTENCES * beams, LENGTH, context),
            jnp.full(SENTENCES, LENGTH, jnp.int32),
            longest=LENGTH,
            search=search,
            bos=1,
            eos=2,
            # No padding (0), start (1) or end (2) of a sentence, so every translation has the full length.
            never=(0, 1, 2),
        )[0]

    compiled = generate.lower(values, source).compile()

    def run() -> None:
        jax.block_until_ready(compiled(values, source))

    run.products = lambda: read_products(compiled.as_text(), unknown_trips=LENGTH)
    return run


def run_products(products: Mapping[Product, int]) -> Callable[[], None]:
    """Returns a function that computes every matrix product on random operands, as often as `products` says."""
    generator, calls = np.random.default_rng(0), []
    for product, count in products.items():
        operands = [
            jnp.asarray(generator.standard_normal(shape), DTYPES[kind])
            for kind, shape in (product.left, product.right)
        ]
        multiply = partial(
            jax.lax.dot_general,
            dimension_numbers=(product.contracted, product.batched),
            preferred_element_type=DTYPES[product.result[0]],
        )
        calls.append((jax.jit(multiply).lower(*operands).compile(), operands, count))

    def run() -> None:
        for multiply, operands, count in calls:
            for _ in range(count):
                jax.block_until_ready(multiply(*operands))

    return run
