"""Cross-entropy with label smoothing."""

from functools import partial

import jax
import jax.numpy as jnp


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def cross_entropy(
    logits_BTV: jax.Array, targets_BT: jax.Array, smoothing: float = 0.0
) -> jax.Array:
    """Returns the cross-entropy -sum_v q_v log p_v of each token, (B, T), in nats.

    As in fairseq, smoothing e gives q = 1 - e to the target and q = e / (V - 1) to all other tokens. The gradient p - q
    is custom, because automatic differentiation would store a second array of the size of the logits.
    """
    return _forward(logits_BTV, targets_BT, smoothing)[0]


@jax.named_scope("loss")
def _forward(logits_BTV, targets_BT, smoothing):
    logits_BTV = logits_BTV.astype(jnp.float32)
    normalizer_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    target_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    loss_BT = normalizer_BT - target_BT
    if smoothing:
        other = smoothing / (logits_BTV.shape[-1] - 1)
        mean_BT = normalizer_BT - logits_BTV.mean(-1)
        loss_BT = (1 - smoothing - other) * loss_BT + other * logits_BTV.shape[-1] * mean_BT
    return loss_BT, (logits_BTV, targets_BT, normalizer_BT)


@jax.named_scope("loss")
def _backward(smoothing, residuals, g_BT):
    logits_BTV, targets_BT, normalizer_BT = residuals
    vocabulary = logits_BTV.shape[-1]
    other = smoothing / (vocabulary - 1)
    hit_BTV = jnp.arange(vocabulary) == targets_BT[..., None]
    q_BTV = jnp.where(hit_BTV, 1 - smoothing, other)
    p_BTV = jnp.exp(logits_BTV - normalizer_BT[..., None])
    return g_BT[..., None] * (p_BTV - q_BTV), None


cross_entropy.defvjp(_forward, _backward)
