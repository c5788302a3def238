"""Parity of pairs of texts with transformers: tokens and segments, states of BERT, and the exported classifier."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", exc_type=ImportError)

from common import variables  # noqa: E402
from common.train.command import fit  # noqa: E402
from perception import adapters, loading  # noqa: E402
from perception.backbones import bert  # noqa: E402
from perception.hugging_face import export  # noqa: E402
from perception.model import backbone  # noqa: E402
from perception.subword import Subword  # noqa: E402
from tests.perception.helpers import draw  # noqa: E402

pytestmark = pytest.mark.peers

SENTENCE = "a man plays the guitar on stage woman sleeps outdoors and dog runs is no one not"
WORDS = SENTENCE.split()
SHAPE = replace(bert(2, 16, 24, 2), vocabulary=len(WORDS) + 5, learned=24, longest=24)
PAIRS = [
    ("a man plays the guitar", "no one plays"),
    ("a dog runs on the stage and a woman sleeps outdoors and a man is not on the stage", "a dog"),
    ("dog", "the woman is not on the stage and the man is not on the stage and a dog sleeps no"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Returns a folder with vocab.txt and "model": a BERT with pseudo-random weights and a tokenizer of vocab.txt."""
    folder = tmp_path_factory.mktemp("bert")
    (folder / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])
    )
    tokenizer = transformers.BertTokenizerFast(str(folder / "vocab.txt"))
    model = variables.abstract(lambda rngs: backbone(SHAPE, rngs=rngs))
    values = {n: jnp.asarray(draw(n, v.shape)) for n, v in model.trainable.items()}
    export(folder / "model", SHAPE, values, tokenizer.backend_tokenizer.to_str())
    return folder


def test_pair_tokens_and_segments_match_bert_tokenizer(folder) -> None:
    """Compares with the slow BertTokenizer, which is independent of the library `tokenizers`."""
    slow = transformers.BertTokenizer(str(folder / "vocab.txt"))
    rows, firsts, cut = Subword.load(folder / "model" / "tokenizer.json").encode_parts(PAIRS, 16)
    for pair, ids, first in zip(PAIRS, rows, firsts, strict=True):
        wanted = slow(*pair, truncation="longest_first", max_length=16)
        assert ids == wanted["input_ids"]
        assert [int(i >= first) for i in range(len(ids))] == wanted["token_type_ids"]
    assert cut == 2


def test_states_of_a_padded_batch_of_pairs_match_bert_model(folder) -> None:
    tokenizer = transformers.BertTokenizerFast(str(folder / "vocab.txt"))
    given = tokenizer(
        *zip(*PAIRS, strict=True), truncation=True, max_length=24, padding=True, return_tensors="pt"
    )
    reference = transformers.BertModel.from_pretrained(folder / "model").eval()
    with torch.no_grad():
        wanted_BLD = reference(**given).last_hidden_state.numpy()
        single_BLD = reference(
            given["input_ids"], given["attention_mask"]
        ).last_hidden_state.numpy()
    abstract_model = variables.abstract(lambda rngs: backbone(SHAPE, rngs=rngs))
    values = {n: jnp.asarray(draw(n, v.shape)) for n, v in abstract_model.trainable.items()}
    lengths_B = given["attention_mask"].sum(1).numpy()
    types_BL = jnp.asarray(given["token_type_ids"].numpy())
    tokens_BL = jnp.asarray(given["input_ids"].numpy())
    found_BLD = abstract_model.build(values, {})(tokens_BL, jnp.asarray(lengths_B), None, types_BL)
    for found_LD, wanted_LD, single_LD, length in zip(
        found_BLD, wanted_BLD, single_BLD, lengths_B, strict=True
    ):
        np.testing.assert_allclose(found_LD[:length], wanted_LD[:length], atol=2e-4)
        assert abs(wanted_LD[:length] - single_LD[:length]).max() > 0.01


def test_readme_code_of_an_exported_pair_classifier_matches_the_run(
    folder, make, mesh, tmp_path
) -> None:
    """Runs the Python code in the export's README.md. The softmax of its logits gives the probabilities of the run."""
    rows = [{"first": a, "second": b, "label": i % 2} for i, (a, b) in enumerate(PAIRS * 4)]
    (tmp_path / "data").mkdir()
    for split in ("train", "validation", "test"):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "data" / f"{split}.jsonl").write_text(text)
    fields = {"data.source": f"files:{tmp_path / 'data'}", "data.fields": "first second"}
    fields |= {"data.pair": True, "finetune": "lora", "pretrained": str(folder / "model")}
    fit(make(**fields, **{"data.max_length": 24, "data.buckets": (24,)}), tmp_path / "run", mesh)
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sys, "argv", ["adapters", "export", f"--run={tmp_path / 'run'}", f"--out={out}"]
        )
        adapters.main()
        patch.chdir(out)
        (code,) = re.findall(r"```python\n(.*?)```", (out / "README.md").read_text(), re.DOTALL)
        first, second = PAIRS[0]
        code = code.replace('"A text.", "Another text."', f"{first!r}, {second!r}")
        names: dict = {}
        exec(code, names)
    trained = loading.load(tmp_path / "run", mesh)
    windows, firsts, _ = trained.encode_pairs(PAIRS[:1])
    (wanted_C,) = trained.probabilities_of(windows, 1, firsts)
    np.testing.assert_allclose(names["logits"].softmax(0).detach().numpy(), wanted_C, atol=1e-4)
