"""Text classifiers with Hugging Face models and peft adapters."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import BertConfig, BertModel, Qwen2Config, Qwen2Model

from benchmarks.peers.training import make_runner
from common.train.conditions import cores

RANK = 32
TARGETS = {"bert": ["dense"], "qwen2": ["q_proj", "k_proj", "v_proj"]}


def _backbone(family: str, sizes: tuple[int, ...]) -> nn.Module:
    """Returns a Hugging Face model with random weights. `benchmarks.lora.SIZES` explains `sizes`."""
    layers, width, hidden, heads, *kv_heads, vocabulary = sizes
    fields = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    if family == "bert":
        return BertModel(BertConfig(**fields), add_pooling_layer=False)
    fields |= {"num_key_value_heads": kv_heads[0], "use_cache": False}
    return Qwen2Model(Qwen2Config(**fields))


class Classifier(nn.Module):
    """A linear layer on the mean of a backbone's last hidden states and on the hidden state of the last token."""

    def __init__(self, family: str, sizes: tuple[int, ...], finetune: str, classes: int):
        super().__init__()
        backbone = _backbone(family, sizes)
        width = backbone.config.hidden_size
        if finetune == "lora":
            options = {"r": RANK, "lora_alpha": RANK, "lora_dropout": 0.05}
            backbone = get_peft_model(
                backbone, LoraConfig(target_modules=TARGETS[family], **options)
            )
        self.backbone, self.head = backbone, nn.Linear(2 * width, classes)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.backbone(input_ids=tokens, attention_mask=mask).last_hidden_state.float()
        weights = mask[..., None].float()
        mean = (x * weights).sum(1) / weights.sum(1)
        last = x[torch.arange(len(x), device=x.device), mask.sum(1) - 1]
        return self.head(torch.cat([mean, last], -1))


def make_step(
    family: str,
    sizes: tuple[int, ...],
    finetune: str,
    dtype: str,
    batch: int,
    length: int,
    classes: int,
    optimizer: str = "adafactor",
    *,
    device: str = "cpu",
    **options,
) -> Callable[[], float]:
    """Returns a function that runs a training step of a `Classifier` on random tokens and returns the loss.

    Args:
      optimizer: "adafactor" for transformers' Adafactor, a loop over the parameters; "adamw" for the fused AdamW.
      options: `compiled` and `steps` of `make_runner`.
    """
    torch.set_num_threads(cores())
    torch.manual_seed(0)
    model = Classifier(family, sizes, finetune, classes).train().to(device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    rates = {"lr": 1e-4, "weight_decay": 1e-5}
    if optimizer == "adafactor":
        from transformers import Adafactor

        rule = Adafactor(parameters, relative_step=False, scale_parameter=False, **rates)
    else:
        rule = torch.optim.AdamW(parameters, fused=True, **rates)
    vocabulary = model.backbone.config.vocab_size
    tokens = torch.randint(0, vocabulary, (batch, length)).to(device)
    mask, labels = torch.ones_like(tokens), torch.randint(0, classes, (batch,)).to(device)

    def loss(tokens: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(tokens, mask).float(), labels)

    options |= {"clipped": parameters, "device": device}
    return make_runner(loss, [tokens, mask, labels], rule, dtype, **options)
