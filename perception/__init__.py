"""The paper "For Perception Tasks: is LLM Pretraining by Next-Token Prediction Worth its Cost?".

`lora` and `quantize` add adapters and quantized kernels to any Flax NNX model.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perception.parts import Frozen, LoraLayer, QuantizedLayer, lora, merge, quantize, thaw

__all__ = ["Frozen", "LoraLayer", "QuantizedLayer", "lora", "merge", "quantize", "thaw"]


def __getattr__(name: str) -> object:
    # Import `perception.parts` on first use, because training does not need it.
    if name in __all__:
        from perception import parts

        return getattr(parts, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
