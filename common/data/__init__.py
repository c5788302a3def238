"""Text sources, tokenizers and batches."""
