"""The paper "For Perception Tasks: is LLM Pretraining by Next-Token Prediction Worth its Cost?".

`lora` and `quantize` add adapters and quantized kernels to any Flax NNX model. `load_run` loads a trained classifier.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perception.labelling import load_run
    from perception.parts import Frozen, LoraLayer, QuantizedLayer, lora, merge, quantize, thaw

__all__ = ["Frozen", "LoraLayer", "QuantizedLayer", "load_run", "lora", "merge", "quantize", "thaw"]


def __getattr__(name: str) -> object:
    # Import these modules on first use, because training does not need them.
    if name in __all__:
        module = "labelling" if name == "load_run" else "parts"
        return getattr(import_module(f"perception.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
