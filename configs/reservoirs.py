"""The fields of `model` that say which layers are never trained. Imported by the recipes; not an experiment itself."""


def fields() -> dict:
    """None; with a kind of reservoir, two of them. reservoir/backskip.py explains the fields of `backskip`."""
    return {
        "reservoir": "none",
        "reservoirs": 2,
        "placement": "alternate",
        # True trains the layers in the places of reservoirs, from the same initialization.
        "reservoir_trained": False,
        "reservoir_init": "orthogonal",
        "reservoir_gain": 1.0,
        "reservoir_dropout": True,
        # Of a reservoir; 0 is the model's `hidden`, and for a bigru its width.
        "reservoir_hidden": 0,
        "kernel": 7,
        "layerdrop": 0.0,
        # Of all other layers, which are trained.
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
