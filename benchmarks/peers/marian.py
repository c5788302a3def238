"""Hugging Face's MarianMT with random weights: greedy and beam-search generation with a KV cache."""

from collections.abc import Callable

import torch
from transformers import GenerationConfig, MarianConfig, MarianMTModel

from common.train.conditions import cores

VOCABULARY = 10_000
PADDING, END = 0, 1


def make_generate(
    num_beams: int, sentences: int = 32, length: int = 32
) -> Callable[[], torch.Tensor]:
    """Returns a function that translates random sentences and returns ids (sentences, 1 + length).

    Minimum and maximum length are equal, so that the amount of work does not depend on the random weights.
    """
    torch.set_num_threads(cores())
    torch.manual_seed(0)
    config = MarianConfig(
        vocab_size=VOCABULARY,
        d_model=512,
        encoder_layers=8,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=1024,
        decoder_ffn_dim=1024,
        activation_function="relu",
        scale_embedding=True,
        max_position_embeddings=2 * length,
        pad_token_id=PADDING,
        eos_token_id=END,
        decoder_start_token_id=PADDING,
        forced_eos_token_id=None,
    )
    model = MarianMTModel(config).eval()
    settings = GenerationConfig(
        num_beams=num_beams,
        min_new_tokens=length,
        max_new_tokens=length,
        do_sample=False,
        use_cache=True,
        pad_token_id=PADDING,
        eos_token_id=END,
        decoder_start_token_id=PADDING,
    )
    source_BL = torch.randint(END + 1, VOCABULARY, (sentences, length))
    mask_BL = torch.ones_like(source_BL)

    @torch.inference_mode()
    def generate() -> torch.Tensor:
        return model.generate(source_BL, attention_mask=mask_BL, generation_config=settings)

    return generate
