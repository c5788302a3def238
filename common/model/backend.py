"""Which kind of device a program is made for."""

import jax


def backend() -> str:
    """ "cpu", "gpu" or "tpu": the devices of the mesh that is set (`jax.set_mesh`), or else JAX's default ones.

    The two differ where a step is compiled for devices that this machine does not have.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else jax.default_backend()
