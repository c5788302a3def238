"""Hugging Face's MarianMT with random weights: greedy and beam-search generation with a KV cache."""

from collections.abc import Callable

import torch
from transformers import GenerationConfig, MarianConfig, MarianMTModel

from common.train.conditions import cores

VOCABULARY, SENTENCES, LENGTH = 10_000, 32, 32
PADDING, END = 0, 1


def make_generate(num_beams: int) -> Callable[[], None]:
    """Returns a function that translates random sentences into LENGTH tokens each, whatever the random weights are."""
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
        max_position_embeddings=2 * LENGTH,
        pad_token_id=PADDING,
        eos_token_id=END,
        decoder_start_token_id=PADDING,
        forced_eos_token_id=None,
    )
    model = MarianMTModel(config).eval()
    settings = GenerationConfig(
        num_beams=num_beams,
        min_new_tokens=LENGTH,
        max_new_tokens=LENGTH,
        do_sample=False,
        use_cache=True,
        pad_token_id=PADDING,
        eos_token_id=END,
        decoder_start_token_id=PADDING,
    )
    source_BL = torch.randint(END + 1, VOCABULARY, (SENTENCES, LENGTH))
    mask_BL = torch.ones_like(source_BL)

    @torch.inference_mode()
    def generate() -> None:
        model.generate(source_BL, attention_mask=mask_BL, generation_config=settings)

    return generate
