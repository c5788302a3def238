"""The fields of `model` that say which layers are never trained. Imported by the recipes; not an experiment itself."""


def fields() -> dict:
    """None; with a kind of reservoir, two of them. reservoir/backskip.py explains the fields of `backskip`."""
    return {
        "reservoir": "none",
        "reservoirs": 2,
        "placement": "alternate",
        "reservoir_dropout": True,
        "kernel": 7,
        "layerdrop": 0.0,
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
