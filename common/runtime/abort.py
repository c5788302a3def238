"""Delays the abort of JAX's runtime, so that the loss of process 0 ends this process with one line and one exit code.

Without the delay, the runtime of jax 0.10.2 prints a C++ stack and exits with SIGABRT when process 0 dies, before the
heartbeat thread has named the lost process.
"""

import ctypes
import signal


def hold_abort() -> None:
    """Delays abort() by six seconds, so that the heartbeat thread can print its line and set the exit code.

    JAX's runtime calls abort() as soon as process 0 has exited, in C++ threads, which cannot run a Python signal
    handler. The handler of SIGABRT is therefore the C function sleep(); its argument is the signal's number, 6. No
    setting of jax 0.10.2 prevents the abort: `jax_enable_recoverability` does not delay it, and
    `jax.distributed.initialize` takes no callback.
    """
    library = ctypes.CDLL(None)
    library.signal.argtypes = ctypes.c_int, ctypes.c_void_p
    library.signal(int(signal.SIGABRT), ctypes.cast(library.sleep, ctypes.c_void_p))
