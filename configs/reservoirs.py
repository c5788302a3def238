"""Default fields of `model` for reservoirs. Imported by the recipes; not an experiment itself."""

from reservoir.kinds import default_options


def fields() -> dict:
    """Returns the fields with no reservoirs. reservoir/backskip.py explains the fields of `backskip`."""
    return {
        # A key of `RESERVOIRS`, "none", or "my_package.kinds:my_kind".
        "reservoir": "none",
        "reservoirs": 2,
        "placement": "alternate",
        # Trains the reservoir layers, from the initialization of reservoirs.
        "reservoir_trained": False,
        "reservoir_init": "orthogonal",
        "reservoir_gain": 1.0,
        "reservoir_dropout": True,
        # Hidden size of reservoirs; 0 is `model.hidden`, and `model.width` for a bigru.
        "reservoir_hidden": 0,
        **default_options(),
        "layerdrop": 0.0,
        # Initialization of the layers that are not reservoirs.
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
