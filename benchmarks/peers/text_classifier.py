"""Trains text classifiers with transformers, peft and scikit-learn: the baseline of `benchmarks.worth`.

    python benchmarks/peers/text_classifier.py --data DIR --model DIR --ways lora head --output_dir OUT --seed 1 ...

`benchmarks.worth` compares this script with `perception.worth`. The script also accepts all options of transformers'
`TrainingArguments`.
"""

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

RATES = {"lora": 1e-3, "full_pretrained": 1e-4}
INVERSE_PENALTIES = (0.01, 0.1, 1.0, 10.0, 100.0)


@dataclass
class Settings:
    data: str
    model: str
    ways: list[str] = field(default_factory=lambda: ["lora"])
    length: int = 64


def weighted_f1(labels, guesses):
    return 100 * f1_score(labels, guesses, average="weighted")


def read(split):
    with gzip.open(Path(settings.data) / f"{split}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def encode(rows):
    texts = [row["text"] for row in rows]
    inputs = tokenizer(texts, truncation=True, max_length=settings.length)["input_ids"]
    return [{"input_ids": x, "labels": row["label"]} for x, row in zip(inputs, rows, strict=True)]


def train(way):
    set_seed(arguments.seed)
    classes = len({row["label"] for row in splits["train"]})
    model = AutoModelForSequenceClassification.from_pretrained(settings.model, num_labels=classes)
    if way == "lora":
        targets = ["intermediate.dense", "output.dense"]
        lora = LoraConfig("SEQ_CLS", r=32, lora_alpha=32, lora_dropout=0.05, target_modules=targets)
        model = get_peft_model(model, lora)
    arguments.learning_rate = RATES[way]
    arguments.output_dir = str(out / f"{way}_seed{arguments.seed}")
    trainer = Trainer(
        model,
        arguments,
        train_dataset=encode(splits["train"]),
        eval_dataset=encode(splits["validation"]),
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda p: {
            "weighted_f1": weighted_f1(p.label_ids, p.predictions.argmax(1))
        },
    )
    trainer.train()
    # With group_by_length, the Trainer would also sort test examples by length, and return predictions in that order.
    trainer.args.group_by_length = False
    logits = torch.tensor(trainer.predict(encode(splits["test"])).predictions)
    return trainer.state.best_metric, logits.log_softmax(-1)


@torch.no_grad()
def embed(rows):
    model, pad = (
        AutoModel.from_pretrained(settings.model).eval(),
        DataCollatorWithPadding(tokenizer),
    )
    features = []
    for start in range(0, len(rows), 64):
        batch = pad([{"input_ids": row["input_ids"]} for row in encode(rows[start : start + 64])])
        mask = batch["attention_mask"][..., None]
        features.append((model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1))
    return torch.cat(features).numpy()


def regression(features):
    labels = {split: [row["label"] for row in rows] for split, rows in splits.items()}
    best = None
    for penalty in INVERSE_PENALTIES:
        model = LogisticRegression(C=penalty, max_iter=1000)
        model.fit(features["train"], labels["train"])
        valid = weighted_f1(labels["validation"], model.predict(features["validation"]))
        if best is None or valid > best[0]:
            best = valid, model.predict_log_proba(features["test"])
    return best


def head():
    return regression({split: embed(rows) for split, rows in splits.items()})


def tf_idf():
    texts = {split: [row["text"] for row in rows] for split, rows in splits.items()}
    features = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True).fit(texts["train"])
    return regression({split: features.transform(text) for split, text in texts.items()})


settings, arguments = HfArgumentParser((Settings, TrainingArguments)).parse_args_into_dataclasses()
out = Path(arguments.output_dir)
tokenizer = AutoTokenizer.from_pretrained(settings.model)
splits = {split: read(split) for split in ("train", "validation", "test")}
for way in settings.ways:
    valid, logs = {"head": head, "tf_idf": tf_idf}.get(way, lambda way=way: train(way))()
    result = {"valid": valid, "logs": np.asarray(logs).tolist()}
    (out / f"{way}_seed{arguments.seed}.json").write_text(json.dumps(result))
    print(way, "validation weighted F1", valid)
