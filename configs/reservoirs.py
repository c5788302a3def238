"""The fields of `model` that say which layers are never trained. Imported by the recipes; not an experiment itself."""


def fields() -> dict:
    """None; with a kind of reservoir, two of them."""
    return {"reservoir": "none", "reservoirs": 2, "reservoir_dropout": True}
