"""Lists the supported model families. A new family needs one entry in this table."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from perception.backbones import Backbone
from perception.families import decoders, encoders, openelm
from perception.families.fields import Fields, Names


@dataclass(frozen=True)
class Family:
    """File format of a model family.

    Attributes:
      name: prefix of the family's class names, such as "Bert" of BertModel.
      read, write: functions that convert the fields of config.json to a backbone, and back.
      names: names of the tensors.
    """

    name: str
    read: Callable[[Fields], Backbone]
    write: Callable[[Backbone], dict[str, Any]]
    names: Names


FAMILIES = {
    "bert": Family("Bert", encoders.read_bert, encoders.write_bert, encoders.BERT),
    "roberta": Family("Roberta", encoders.read_roberta, encoders.write_roberta, encoders.ROBERTA),
    "xlm-roberta": Family(
        "XLMRoberta", encoders.read_xlm_roberta, encoders.write_roberta, encoders.ROBERTA
    ),
    "distilbert": Family(
        "DistilBert", encoders.read_distilbert, encoders.write_distilbert, encoders.DISTILBERT
    ),
    "mpnet": Family("MPNet", encoders.read_mpnet, encoders.write_mpnet, encoders.MPNET),
    "deberta-v2": Family(
        "DebertaV2", encoders.read_deberta, encoders.write_deberta, encoders.DEBERTA
    ),
    "modernbert": Family(
        "ModernBert", encoders.read_modernbert, encoders.write_modernbert, encoders.MODERNBERT
    ),
    "qwen2": Family("Qwen2", decoders.read_qwen2, decoders.write_gated, decoders.LLAMA),
    "mistral": Family("Mistral", decoders.read_mistral, decoders.write_gated, decoders.LLAMA),
    "llama": Family("Llama", decoders.read_llama, decoders.write_llama, decoders.LLAMA),
    "gemma": Family("Gemma", decoders.read_gemma, decoders.write_gemma, decoders.LLAMA),
    "phi": Family("Phi", decoders.read_phi, decoders.write_phi, decoders.PHI),
    "openelm": Family("OpenELM", openelm.read_openelm, openelm.write_openelm, openelm.OPENELM),
}
"""Field `model_type` of config.json -> family."""
