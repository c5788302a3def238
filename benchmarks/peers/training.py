"""The training step of the PyTorch models."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


def make_runner(
    loss: Callable[..., Tensor],
    batch: Sequence[Tensor],
    optimizer: torch.optim.Optimizer,
    dtype: str,
    *,
    clipped: Sequence[nn.Parameter] = (),
    device: str = "cpu",
    compiled: bool = False,
    steps: int = 1,
) -> Callable[[], float]:
    """Returns a function that runs training steps on one batch, waits after the last step, and returns its loss.

    Args:
      loss: function of the tensors of `batch`. Runs under autocast if `dtype` is "bfloat16".
      clipped: parameters whose gradients are clipped at a global norm of 1.
      compiled: whether to use `torch.compile` for the loss and its backward pass.
      steps: training steps in a call.
    """

    def forward(*tensors: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
            return loss(*tensors)

    if compiled:
        forward = torch.compile(forward, dynamic=False)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        result = forward(*batch)
        result.backward()
        if clipped:
            nn.utils.clip_grad_norm_(clipped, 1.0)
        optimizer.step()
        return result.detach()

    def run() -> float:
        for _ in range(steps - 1):
            step()
        return step().item()

    return run
