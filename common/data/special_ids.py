"""Ids of padding, begin of sentence, end of sentence and the unknown token, in every vocabulary of this project."""

PAD, BOS, EOS, UNK = range(4)
