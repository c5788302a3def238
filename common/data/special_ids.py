"""Ids of padding, begin of sentence, end of sentence and the unknown token in a `common.data.tokenizer.Tokenizer`."""

PAD, BOS, EOS, UNK = range(4)
