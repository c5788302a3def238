"""Writes gru_golden.npz: weights of a bidirectional torch.nn.GRU, a random input with lengths, and the output.

Needs PyTorch. Run this program by hand.
"""

from pathlib import Path

import numpy as np
import torch

BATCH, LENGTH, WIDTH = 3, 5, 6


def main() -> None:
    torch.manual_seed(0)
    gru = torch.nn.GRU(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)
    x, lengths = torch.randn(BATCH, LENGTH, WIDTH), [5, 3, 1]
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    y, _ = torch.nn.utils.rnn.pad_packed_sequence(gru(packed)[0], batch_first=True)
    values = {name: value.detach().numpy() for name, value in gru.named_parameters()}
    values |= {"x": x.numpy(), "y": y.detach().numpy(), "lengths": np.array(lengths)}
    np.savez(Path(__file__).parent / "gru_golden.npz", **values)


if __name__ == "__main__":
    main()
