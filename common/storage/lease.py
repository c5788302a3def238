"""The lease of a folder in a bucket: an object that names the one process that may write the folder.

A bucket has no file locks. The holder of the lease therefore renews the lease at intervals of a quarter of
TRAINLESS_LEASE_SECONDS: it replaces the object, on condition that no other process has replaced the object.

A process acquires the lease at once in three cases: the folder has no lease, the last holder has released the lease, or
the last holder used the same local copy (`mirror.identity`). In the third case, the file lock of the run proves that
the last holder has exited. In all remaining cases, the process watches the object. If the object changes, the holder is
alive, and the process raises a UserError. If the object does not change for the holder's TRAINLESS_LEASE_SECONDS (a
field of the object), the holder counts as dead, and the process takes the lease.

If two processes take the lease at the same time, the store accepts one of the two writes. The clocks of hosts are not
compared, but must run at about the same speed. A holder that cannot renew the lease in time stops uploading until the
lease is renewed. If another process has taken the lease, the former holder stops its run.

Limitation: if a holder is suspended during the upload of a file for longer than the lease, the upload may finish after
another process has taken the lease.
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
from common.storage.mirror import LEASE, Mirror, identity, lease_fields
from common.storage.stores import Changed

SECONDS = "TRAINLESS_LEASE_SECONDS", 60
"""Environment variable with the timeout of a lease in seconds, and its default. A holder that does not renew its lease
for this time counts as dead."""


class Lease:
    """The lease of a folder, held from `acquire` to `release` as long as `renew` is called often enough.

    `acquire`, `renew` and `release` also raise the UserErrors of `common.storage.stores.Store`.

    Attributes:
      seconds: seconds without a renewal after which other processes may take the lease.
    """

    def __init__(self, mirror: Mirror, address: str):
        self._store, self._name = mirror.store, mirror.object_name(LEASE)
        self._address, self.seconds = address, seconds(SECONDS)
        self._me = f"process {os.getpid()} of {_user()} on {socket.gethostname()}"
        self._version, self._content, self._renewed = "", b"", 0.0
        self._copy = identity()

    def acquire(self) -> bool:
        """Takes the lease. Raises a UserError if another process holds and renews the lease.

        Returns the argument `ours` of `mirror.update`: whether the last writer of the folder used this local copy, or
        the folder had no lease.
        """
        seen, since = "", time.monotonic()
        while True:
            begun = time.monotonic()
            content, version = self._store.read(self._name) or (b"", "")
            fields = lease_fields(content)
            holder, silence = fields["holder"], fields.get("seconds", self.seconds)
            if time.monotonic() - begun > silence / 4:
                # The store was slow, so the holder may have been unable to renew the lease. Restart the wait.
                since = time.monotonic()
            ours = fields["copy"] in ("", self._copy)
            if not holder or ours or (version == seen and time.monotonic() - since > silence):
                try:
                    self._replace(version, self._me)
                    return ours
                except Changed:
                    continue
            if not seen:
                print(
                    f"{self._address} was last written by {holder}: waiting up to {silence:.0f} s to see"
                    " whether that process is still running",
                    file=sys.stderr,
                    flush=True,
                )
                seen, since = version, time.monotonic()
            if version != seen:
                raise UserError(
                    f"another process is training in {self._address} ({holder}): wait until it ends, or choose another"
                    " --workdir"
                )
            time.sleep(min(1.0, silence / 10))

    @property
    def is_fresh(self) -> bool:
        """Whether the last renewal is recent enough that no other process can have taken the lease."""
        return time.monotonic() - self._renewed < self.seconds

    def renew(self) -> None:
        """Replaces the lease's object in the bucket.

        Raises a UserError if another process has taken the lease, or if the lease's object was deleted.
        """
        self._replace_own(self._me)

    def release(self) -> None:
        """Empties the field "holder" of the lease's object; keeps the field "copy". Raises the errors of `renew`."""
        self._replace_own("")

    def _replace_own(self, holder: str) -> None:
        try:
            self._replace(self._version, holder)
        except Changed:
            content, version = self._store.read(self._name) or (b"", "")
            if content != self._content:
                if not content:
                    raise UserError(
                        f"{self._address}/{LEASE} was deleted, so another process could train in this folder; this"
                        " process stops: repeat the command to resume"
                    ) from None
                other = lease_fields(content)["holder"] or "another process"
                raise UserError(
                    f"{other} has taken over {self._address}, because {LEASE} was deleted, or this process did not"
                    f" renew it for {self.seconds} s; this process stops: repeat the command after the other process"
                    " has ended"
                ) from None
            # This process wrote the object, but the response of the store was lost.
            self._version = version

    def _replace(self, version: str, holder: str) -> None:
        begun = time.monotonic()  # a lower bound of the time of the write
        fields = {"holder": holder, "copy": self._copy, "seconds": self.seconds}
        fields["word"] = uuid.uuid4().hex  # makes each written content unique
        self._content = json.dumps(fields).encode()
        self._version = self._store.write(self._name, self._content, version)
        self._renewed = begun


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # In a container, the user id may have no name.
        return str(os.getuid())
