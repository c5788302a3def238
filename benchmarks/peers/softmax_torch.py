"""A softmax layer over the token before, trained with Adagrad in PyTorch, in the three forms that a user would write.

None has the paper's noise: with it only the first form would stay as it is, and the other two would have to
update every row of the table at every step.

Letters: B batch, N vocabulary.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.harness import cores

FORMS = ("one-hot", "embedding", "sparse")


def make_step(form: str, vocabulary: int, batch: int, tokens: np.ndarray) -> Callable[[], float]:
    """A call makes one training step on the next `batch` tokens of a text and returns its loss."""
    torch.set_num_threads(cores())
    bound = vocabulary**-0.5
    table_NN = torch.empty(vocabulary, vocabulary).uniform_(-bound, bound).requires_grad_()
    optimizer = torch.optim.Adagrad([table_NN], lr=0.01)
    text = torch.from_numpy(tokens.astype(np.int64))
    place = 0

    def logits(before_B: torch.Tensor) -> torch.Tensor:
        if form == "one-hot":
            return F.one_hot(before_B, vocabulary).float() @ table_NN
        return F.embedding(before_B, table_NN, sparse=form == "sparse")

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
