"""Uploads the files of a run to a bucket during training."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from common.errors import UserError
from common.storage import addresses
from common.storage.lease import Lease
from common.storage.mirror import Mirror, alone, order, update

INTERVAL = 10.0
"""Seconds from the end of an upload to the next search for changed files."""


class Uploads:
    """Holds the lease of a run in a bucket, and uploads changed files of the run's local copy.

    One thread renews the lease, and another thread uploads. If the store is unavailable for too long, or another
    process takes the lease, the failing thread sends SIGTERM to this process. The run then saves a checkpoint in the
    local copy and stops, and `release` raises the error. The same command later uploads the local copy and resumes from
    the checkpoint, unless another process has written to the run's folder in the bucket.

    The caller must hold the lock of the local copy (`common.train.workdir.lock_workdir`).
    """

    def __init__(self, folder: Path):
        """Takes the lease, and updates the local copy `folder` from the bucket.

        Raises a UserError if another process is training in this run, or if `open_store`, a request to the store or
        `update` fails.
        """
        self._folder, self._address = folder, addresses.address(folder)
        self._mirror = Mirror(folder)
        # The thread that renews the lease needs its own connection, so it gets its own Mirror.
        leased = Mirror(folder)
        leased.store.outage = self._mirror.store.outage
        self._lease = Lease(leased, self._address)
        self._error: Exception | None = None
        self._alone = threading.Lock()
        ours = self._lease.acquire()
        self._renewing = _Repeated(self._lease.renew, self._lease.seconds / 4, self._fail)
        try:
            with alone(folder):
                update(self._mirror, lambda path: True, ours)
            self._objects = set(self._mirror.objects())
        except BaseException:
            self._renewing.end()
            raise
        self._uploading = _Repeated(self.upload, INTERVAL, self._fail)

    def release(self) -> None:
        """Uploads the last changes and releases the lease.

        Raises the first error of the threads or of these requests: a UserError if a request to the store failed, or if
        the lease was deleted or taken by another process.
        """
        for thread, last_call in (
            (self._uploading, self.upload),
            (self._renewing, self._lease.release),
        ):
            thread.end()
            try:
                if self._error is None:
                    last_call()
            except UserError as error:
                self._fail(error)
        if self._error is None:
            return
        if not isinstance(self._error, UserError):
            raise self._error
        raise UserError(
            f"{self._error}; {self._folder} contains this machine's copy of {self._address}"
        ) from self._error

    def upload(self) -> None:
        """Uploads changed files of the local copy, and deletes the objects of deleted files.

        Omits the files that `Mirror.files` omits. Starts again if a local file is deleted meanwhile.
        """
        with self._alone:
            while not self._try_upload():
                pass

    def _try_upload(self) -> bool:
        files = self._mirror.files()
        for path in sorted(files, key=order):
            if path in self._objects and self._mirror.is_uploaded(path, files[path]):
                continue
            self._wait_for_lease()
            try:
                self._mirror.upload(path)
            except FileNotFoundError:
                return False
            self._objects.add(path)
        for path in sorted(self._objects - files.keys(), key=order, reverse=True):
            self._wait_for_lease()
            self._mirror.delete_object(path)
            self._objects.remove(path)
        return True

    def _wait_for_lease(self) -> None:
        """Waits while the lease may have expired. Raises the error that has stopped one of the threads."""
        while not self._lease.is_fresh:
            if self._error is not None:
                raise self._error
            time.sleep(0.2)

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        # Without a handler, SIGTERM would kill the process. The run is then not training and needs no signal, because
        # it soon calls `release`, which raises the error.
        if callable(signal.getsignal(signal.SIGTERM)):
            os.kill(os.getpid(), signal.SIGTERM)


class _Repeated:
    """A thread that calls a function again and again, with a pause of `pause` seconds, until `end` or an error.

    After an error, the thread calls `failed` with the error.
    """

    def __init__(self, call: Callable[[], None], pause: float, failed: Callable[[Exception], None]):
        self._call, self._pause, self._failed = call, pause, failed
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._ended.wait(self._pause):
                self._call()
        except Exception as error:  # `Uploads.release` raises the error in the main thread.
            self._failed(error)

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
