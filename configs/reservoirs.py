"""Default fields of `model` for reservoirs, shared by the recipes of the reservoir paper."""

from reservoir.kinds import RESERVOIRS


def fields() -> dict:
    """Returns the default fields: a model without reservoirs. `reservoir.backskip` documents the group `backskip`."""
    kinds = RESERVOIRS.values()
    return {
        # Kind of reservoir: a key of `reservoir.kinds.RESERVOIRS`, "none", or "MODULE:NAME" of a user's kind.
        "reservoir": "none",
        "reservoirs": 2,
        "placement": "alternate",
        # True trains the reservoirs instead of freezing them. The distributions of the initial values are the same.
        "reservoir_trained": False,
        "reservoir_init": "orthogonal",
        "reservoir_gain": 1.0,
        "reservoir_dropout": True,
        # Hidden size of reservoirs; 0 means `model.hidden`, or `model.width` for a bigru.
        "reservoir_hidden": 0,
        **{name: x.default for kind in kinds for name, x in kind.options.items()},
        "layerdrop": 0.0,
        # Initialization of the layers of a stack that are not reservoirs: a key of `reservoir.model.INITS`.
        "init": "recipe",
        "backskip": {
            "estimator": "none",
            "warmup_steps": -1,
            "anneal": 0.99,
            "least": 0.01,
            "sigma": 1.0,
            "reward": "signed",
            "scale": 1.0,
            "value_rate": 1e-3,
        },
    }
