"""Writes the classification head and a README.md to a directory in Hugging Face's or PEFT's format.

transformers has no class for sequence classification with this paper's pooling (mean and last state), so the README.md
contains Python code that classifies a text.
"""

import json
from pathlib import Path

import numpy as np

from perception.config_json import CONFIG
from perception.finetuning import has_segments
from perception.loading import Trained
from perception.peft_format import CONFIG as ADAPTER_CONFIG
from perception.safetensor_files import Tensor, write

CLASSIFIER = "classifier"
"""Subdirectory with the classification head: weight (C, 2 D), bias (C,), and a config.json with the class names,
pooling, maximum length, padding id and, if a text may have several classes, thresholds."""

README = "README.md"

_TEXT = """# Text classifier

{what} `{classifier}` is a linear layer on the mean and the last of the encoder's states, {pooled}.
`AutoModelForSequenceClassification` has no such pooling. These lines of Python, run in this folder, classify a text:

```python
import json, torch
from safetensors.torch import load_file
{imports}
settings, head = json.load(open("{classifier}/{config}")), load_file("{classifier}/model.safetensors")
tokenizer = PreTrainedTokenizerFast(tokenizer_file="tokenizer.json")
{encoder}
{ids}
{states}
logits = head["weight"] @ torch.cat([states.mean(0), states[-1]]) + head["bias"]
{answer}
```
"""

_BEST = 'print(settings["classes"][logits.argmax()])'
_ABOVE = """chances = zip(settings["classes"], logits.sigmoid(), settings["thresholds"])
print([name for name, chance, threshold in chances if chance >= threshold])"""
_AUTO = "from transformers import AutoModel, PreTrainedTokenizerFast"
_STATES = "states = encoder({given}).last_hidden_state[0].float()"
_IDS = 'ids = tokenizer("A text.", truncation=True, max_length=settings["max_length"])["input_ids"]'
_PAIR = """found = tokenizer("A text.", "Another text.", truncation=True, max_length=settings["max_length"],
                  return_token_type_ids=True)
ids = found["input_ids"]"""
_JOINED = _IDS.replace('"A text."', '"A text." + " " + "Another text."')
_MASK = 'mask = torch.arange(settings["max_length"])[None] < len(ids)'
_PAD_TYPES = 'types = found["token_type_ids"] + [0] * (len(ids) - len(found["token_type_ids"]))'
_PAD = 'ids += [settings["pad"]] * (settings["max_length"] - len(ids))'


def _readme(trained: Trained, base: Path | None) -> str:
    given, before, pooled = "torch.tensor([ids])", [], "without padding"
    pair = trained.config.data.pair
    separated = pair and trained.tokenizer.separates_pairs
    if trained.config.pool == "authors":
        pooled = "including the states of padding"
        # The states of padding are pooled too. No position attends to padding, not even with causal attention.
        before = [_MASK, _PAD]
        given += ", attention_mask=mask"
    if separated and has_segments(trained.config, trained.shape):
        before.append(_PAD_TYPES)
        given += ", token_type_ids=torch.tensor([types])"
    if base is None:
        what = "The encoder is in Hugging Face format."
        imports, encoder = _AUTO, 'encoder = AutoModel.from_pretrained(".")'
    else:
        what = (
            "The encoder is an adapter in PEFT's format, and its base model. Where the path of the base"
            f" model below and in `{ADAPTER_CONFIG}` does not exist, replace it, for example by the model's name on the"
            " Hugging Face hub."
        )
        imports = f"from peft import PeftModel\n{_AUTO}"
        encoder = f'encoder = PeftModel.from_pretrained(AutoModel.from_pretrained("{base}"), ".")'
    return _TEXT.format(
        what=what,
        classifier=CLASSIFIER,
        config=CONFIG,
        pooled=pooled,
        imports=imports,
        encoder=encoder,
        answer=_ABOVE if trained.config.data.multi_label else _BEST,
        ids=_PAIR if separated else _JOINED if pair else _IDS,
        states="\n".join([*before, _STATES.format(given=given)]),
    )


def write_classifier(
    folder: Path,
    trained: Trained,
    base: Path | None = None,
    thresholds: tuple[float, ...] = (),
) -> None:
    """Writes the subdirectory CLASSIFIER and README.md.

    Args:
      thresholds: if a text may have several classes, the smallest probability at which each class is predicted;
        otherwise ().
      base: directory of the base model if `folder` contains an adapter; None if `folder` contains the encoder.
    """
    config, own = trained.config, {**trained.values.frozen, **trained.values.trainable}
    head = {"weight": own["head/kernel"].T, "bias": own["head/bias"]}
    (folder / CLASSIFIER).mkdir()
    tensors = {n: Tensor(x.shape, x.dtype, lambda x=x: np.asarray(x)) for n, x in head.items()}
    write(folder / CLASSIFIER, tensors)
    settings = {
        "pool": config.pool,
        "max_length": config.data.max_length,
        "pad": trained.tokenizer.pad,
        "classes": trained.classes,
    }
    if thresholds:
        settings["thresholds"] = thresholds
    (folder / CLASSIFIER / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
    (folder / README).write_text(_readme(trained, base))
