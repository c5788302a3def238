"""A softmax layer on the previous token, trained with Adagrad in PyTorch, in three forms.

The forms are one-hot inputs, an embedding, and an embedding with sparse gradients. No form has the noise that the
paper adds to the inputs. The noise would give every row of the embedding table a gradient in every step.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from common.train.conditions import cores


def make_step(form: str, vocabulary: int, batch: int, tokens: np.ndarray) -> Callable[[], float]:
    """Returns a function that trains on the next `batch` tokens of a text and returns the loss.

    Args:
      form: "one-hot", "embedding" or "sparse".
      tokens: ids of the text, (L,).
    """
    torch.set_num_threads(cores())
    bound = vocabulary**-0.5
    table_VV = torch.empty(vocabulary, vocabulary).uniform_(-bound, bound).requires_grad_()
    optimizer = torch.optim.Adagrad([table_VV], lr=0.01)
    text = torch.from_numpy(tokens.astype(np.int64))
    place = 0

    def logits(before_B: torch.Tensor) -> torch.Tensor:
        if form == "one-hot":
            return F.one_hot(before_B, vocabulary).float() @ table_VV
        return F.embedding(before_B, table_VV, sparse=form == "sparse")

    def step() -> float:
        nonlocal place
        part = text[place : place + batch + 1]
        place = (place + batch) % (len(text) - batch)
        optimizer.zero_grad()
        loss = F.cross_entropy(logits(part[:-1]), part[1:])
        loss.backward()
        optimizer.step()
        return loss.item()

    return step
