"""Loss and label weights for examples with one or several classes.

With one class per example, labels are class indices, (E,). With several classes (multi-label), labels are 0 or 1 for
each class, (E, C).
"""

import jax
import jax.numpy as jnp
import numpy as np

from common.model.loss import cross_entropy


def balanced_weights(labels: np.ndarray) -> np.ndarray:
    """Returns weights that give all classes with examples equal total weight: float32, with the shape of `labels`.

    The weight of a label is examples / (classes with examples * examples of the label's class). With several classes
    per example, the formula applies to each column, with the classes 0 and 1. The mean weight is 1.
    """
    from sklearn.utils.class_weight import compute_sample_weight

    columns = labels.reshape(len(labels), -1).T
    weights = [compute_sample_weight("balanced", column) for column in columns]
    return np.stack(weights, axis=-1).reshape(labels.shape).astype(np.float32)


def loss(logits_BC: jax.Array, labels: jax.Array, weights: jax.Array | float = 1.0) -> jax.Array:
    """Returns the weighted cross-entropy of each row, (B,).

    Multi-label: the mean over the classes of the weighted binary cross-entropy.

    Args:
      weights: weights of the labels, with the shape of `labels`, or one weight for all labels.
    """
    if labels.ndim == 1:
        return cross_entropy(logits_BC, labels) * weights
    with jax.named_scope("loss"):
        signs_BC = jnp.where(labels == 1, 1.0, -1.0)
        return (weights * jax.nn.softplus(-signs_BC * logits_BC.astype(jnp.float32))).mean(-1)
