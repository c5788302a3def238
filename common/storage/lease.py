"""The lease of a folder in a bucket: an object that says which process may write the folder.

A bucket has no lock that ends with its process. Instead, the holder of the lease replaces the object every quarter of
TRAINLESS_LEASE_SECONDS (a heartbeat), on the condition that nobody else has replaced it. A process that wants the lease
takes it at once if the last holder has released it, or was a process of this working directory: the file lock of the
run proves that this process is dead. Otherwise it watches the object: if the object changes, the holder is alive; if it
stays the same for TRAINLESS_LEASE_SECONDS, the holder is dead.

Guaranteed: if two processes take a lease at the same time, the store lets one succeed. Clocks of hosts are not
compared; they must only run at about the same speed. A holder that cannot renew the lease in time stops uploading until
it has renewed the lease. A holder whose lease another process has taken stops for good.

Not guaranteed: a holder that is suspended during an upload, for longer than its lease, may finish the upload of this
one file after another process has taken the lease.
"""

import getpass
import json
import os
import socket
import sys
import time
import uuid

from common.errors import UserError
from common.runtime.heartbeat import seconds
from common.storage.mirror import LEASE, Mirror, identity, last_writer
from common.storage.stores import Changed

SECONDS = "TRAINLESS_LEASE_SECONDS", 60
"""Variable and default of the seconds without a heartbeat after which the holder of a lease counts as dead."""


class LeaseLost(UserError):
    """Another process has taken the lease."""


class Lease:
    """The lease of a folder, held from `acquire` to `release` as long as `renew` is called often enough.

    Attributes:
      seconds: seconds without a heartbeat after which other processes take the lease.
    """

    def __init__(self, mirror: Mirror, address: str):
        self._store, self._name = mirror.store, mirror.object_name(LEASE)
        self._address, self.seconds = address, seconds(SECONDS)
        self._me = f"process {os.getpid()} of {_user()} on {socket.gethostname()}"
        self._version, self._content, self._beats, self._renewed = "", b"", 0, 0.0
        self._copy, self._word = identity(), uuid.uuid4().hex

    def acquire(self) -> bool:
        """Takes the lease; returns whether the copy of this process was the last to write the folder.

        Raises:
          UserError: another process holds the lease.
        """
        seen, since = "", time.monotonic()
        while True:
            begun = time.monotonic()
            content, version = self._store.read(self._name) or (b"", "")
            holder, silence = _holder(content)
            if time.monotonic() - begun > silence / 4:
                since = (
                    time.monotonic()
                )  # after an outage of the store, in which the holder could not renew either
            ours = last_writer(content) in ("", self._copy)
            if not holder or ours or (version == seen and time.monotonic() - since > silence):
                try:
                    self._replace(version, self._me)
                    return ours
                except Changed:
                    continue
            if not seen:
                print(
                    f"{self._address} was last written by {holder}: waiting up to {silence:.0f} seconds to see"
                    " whether it is alive",
                    file=sys.stderr,
                    flush=True,
                )
                seen, since = version, time.monotonic()
            if version != seen:
                raise UserError(f"another process is training in {self._address}: {holder}")
            time.sleep(min(1.0, silence / 10))

    @property
    def is_fresh(self) -> bool:
        """Whether no other process can have taken the lease since its last renewal."""
        return time.monotonic() - self._renewed < self.seconds

    def renew(self) -> None:
        """Replaces the object.

        Raises:
          LeaseLost: another process has replaced it.
        """
        self._replace_own(self._me)

    def release(self) -> None:
        """Removes the holder from the object, which still says which copy has written last."""
        self._replace_own("")

    def _replace_own(self, holder: str) -> None:
        try:
            self._replace(self._version, holder)
        except Changed:
            content, version = self._store.read(self._name) or (b"", "")
            if content != self._content:
                other = _holder(content)[0] or "another process"
                raise LeaseLost(
                    f"{other} has taken over {self._address}, because this process did not answer for"
                    f" {self.seconds} seconds: it stops"
                ) from None
            self._version = version  # the answer to an earlier attempt was lost

    def _replace(self, version: str, holder: str) -> None:
        begun = time.monotonic()  # the earliest time at which the store may write the object
        self._beats += 1
        fields = {"holder": holder, "copy": self._copy, "seconds": self.seconds}
        fields |= {"word": self._word, "beats": self._beats}  # no two contents are equal
        self._content = json.dumps(fields).encode()
        self._version = self._store.write(self._name, self._content, version)
        self._renewed = begun


def _holder(content: bytes) -> tuple[str, float]:
    """Returns the holder of a lease, "" for a free one, and the seconds after which it counts as dead."""
    if not content:
        return "", 0.0
    try:
        fields = json.loads(content)
        return str(fields["holder"]), float(fields["seconds"])
    except (ValueError, KeyError, TypeError):
        return "an unknown process", float(seconds(SECONDS))


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container may run under a number that has no name
        return str(os.getuid())
