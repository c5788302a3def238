"""Exported runs keep their logits in peft and transformers. Adapters of peft, merged by us, give peft's states."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", exc_type=ImportError)
peft = pytest.importorskip("peft", exc_type=ImportError)

from common import variables  # noqa: E402
from common.data.manual import python  # noqa: E402
from common.sharding import make_mesh  # noqa: E402
from common.train import command  # noqa: E402
from perception import adapters, loading  # noqa: E402
from perception.backbones import BACKBONES  # noqa: E402
from perception.hugging_face import export, open_model  # noqa: E402
from perception.model import backbone  # noqa: E402
from perception.subword import build_subword  # noqa: E402
from tests.perception.helpers import draw, states, texts  # noqa: E402

pytestmark = pytest.mark.peers

FAMILIES = ("bert", "qwen2", "mistral", "phi")
TEXT = "The debugger steps to the next line, and then it prints a string."
SHORT = "A string."
"""A text shorter than `max_length`, so that it is padded."""


def call(*arguments: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["adapters", *map(str, arguments)])
        adapters.main()


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Callable[[str], Path]:
    """Returns a function (family) -> folder that writes a tiny model and a tokenizer in Hugging Face format."""

    def make(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family) / "base"
        shape = replace(BACKBONES[f"tiny_{family}"], vocabulary=300)
        model = variables.abstract(lambda rngs: backbone(shape, rngs=rngs))
        values = {n: jnp.asarray(draw(n, v.shape)) for n, v in model.trainable.items()}
        tokenizer = build_subword(300, [text for (text,), _ in python("train")], folder.parent)
        export(folder, shape, values, tokenizer.to_json())
        return folder

    return make


@pytest.fixture(scope="module")
def trained(make, base, tmp_path_factory) -> Callable[[str, str], Path]:
    """Returns a function (family, pool) -> workdir that trains adapters of rank 4 and scale 1.5."""

    def fit(family: str, pool: str) -> Path:
        workdir = tmp_path_factory.mktemp("runs") / family
        fields = {"finetune": "lora", "pretrained": str(base(family)), "pool": pool}
        fields |= {"lora.rank": 4, "lora.alpha": 6.0, "optimizer.learning_rate": 3e-2}
        fields |= {"optimizer.schedule": "constant", "optimizer.warmup_steps": 0}
        fields |= {"data.max_length": 32, "data.buckets": (32,)}
        command.fit(make(**fields), workdir, make_mesh({"data": 1}, jax.devices()[:1]))
        return workdir

    return fit


def logits_of_readme(folder: Path, text: str, monkeypatch) -> np.ndarray:
    """Runs the Python example in a folder's README.md on `text` and returns its logits."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert len(code.splitlines()) <= 13 and '"A text."' in code
    names: dict = {}
    monkeypatch.chdir(folder)
    exec(code.replace('"A text."', repr(text)), names)
    return names["logits"].detach().numpy()


@pytest.mark.parametrize(
    ("family", "pool"),
    [*((family, "masked") for family in FAMILIES), ("bert", "authors"), ("qwen2", "authors")],
)
def test_exported_run_has_the_logits_of_the_run(family, pool, trained, monkeypatch) -> None:
    """peft loads the adapter, transformers the merged encoder. The code of both READMEs computes the run's logits."""
    workdir = trained(family, pool)
    ours = loading.load(workdir)
    (batch,) = ours.batches([[ours.tokenizer.encode([TEXT], 32)[0]]])
    wanted = np.asarray(ours.logits(batch.inputs))[0]
    (padded,) = ours.batches([[ours.tokenizer.encode([SHORT], 32)[0]]])
    short = np.asarray(ours.logits(padded.inputs))[0]
    adapter, whole = workdir / "adapter", workdir / "whole"
    call("peft", f"--run={workdir}", f"--out={adapter}")
    call("export", f"--run={workdir}", f"--out={whole}")
    for folder in (adapter, whole):
        for text, logits in ((TEXT, wanted), (SHORT, short)):
            found = logits_of_readme(folder, text, monkeypatch)
            print(f"{family}, {pool}, {folder.name}: largest error {abs(found - logits).max():.1e}")
            np.testing.assert_allclose(found, logits, atol=1e-4)
    values = ours.values.trainable
    for name in [n for n in values if n.endswith("lora_b")]:
        values[name] = jnp.zeros_like(values[name])
    assert abs(np.asarray(ours.logits(batch.inputs))[0] - wanted).max() > 1e-2


TARGETS = {
    "bert": ["attention.output.dense", "intermediate.dense", "query"],
    "qwen2": ["q_proj", "down_proj"],
    "mistral": ["q_proj", "v_proj"],
    "phi": ["q_proj", "fc1", "self_attn.dense"],
}


@pytest.mark.parametrize("classifier", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapter_of_peft_merges_to_its_states(
    family: str, classifier: bool, base, tmp_path
) -> None:
    """The adapter has several ranks and scales. It adapts an encoder, or the encoder of a sequence classifier."""
    folder = base(family)
    auto = transformers.AutoModelForSequenceClassification if classifier else transformers.AutoModel
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=TARGETS[family],
        rank_pattern={TARGETS[family][0]: 2},
        alpha_pattern={TARGETS[family][1]: 3},
        use_rslora=family == "phi",
        init_lora_weights=False,
        task_type="SEQ_CLS" if classifier else "FEATURE_EXTRACTION",
    )
    theirs = peft.get_peft_model(auto.from_pretrained(folder), config).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    saved = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == str(folder)
    call("merge", f"--adapter={tmp_path / 'adapter'}", f"--out={tmp_path / 'merged'}")

    tokens_BL, lengths_B = texts(300, (16, 9))
    inner = theirs.get_base_model()
    encoder = getattr(inner, inner.base_model_prefix) if classifier else inner
    inside_BL = np.arange(16) < lengths_B[:, None]
    with torch.inference_mode():
        given = {"attention_mask": torch.tensor(inside_BL, dtype=torch.int64)}
        wanted = encoder(torch.tensor(tokens_BL, dtype=torch.int64), **given).last_hidden_state
    found = states(open_model(tmp_path / "merged"), tokens_BL, lengths_B)
    head_DC = draw("head", (found.shape[-1], 5))
    wanted_BLC, found_BLC = wanted.numpy() @ head_DC, found @ head_DC
    error = abs(found_BLC - wanted_BLC)[inside_BL].max()
    print(f"{family}: largest error {error:.1e} of logits up to {abs(wanted_BLC).max():.1f}")
    assert error < 1e-4
    plain = states(open_model(folder), tokens_BL, lengths_B)
    assert abs(plain - found)[inside_BL].max() > 0.1
