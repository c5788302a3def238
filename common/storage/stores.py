"""Reads and writes objects of Google Cloud Storage (google-cloud-storage) and S3 (boto3).

The two libraries read credentials and endpoints from the environment, such as GOOGLE_APPLICATION_CREDENTIALS,
AWS_PROFILE, STORAGE_EMULATOR_HOST and AWS_ENDPOINT_URL. The retries of both libraries are turned off. Instead, `Store`
retries and prints a warning, with the same timeout for both libraries.
"""

import random
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError, check, missing_package, reason_of
from common.runtime.heartbeat import seconds

PATIENCE = "TRAINLESS_BUCKET_SECONDS", 300
"""Environment variable with the retry timeout in seconds, and its default. A request that fails for longer raises a
UserError."""

_CONNECT, _ANSWER = 10, 60
"""Connect timeout and read timeout of a request, in seconds."""

_TRANSIENT = (408, 429, 500, 502, 503, 504)
"""HTTP status codes of transient errors. A request without a response counts as 503."""


class Changed(Exception):
    """Raised if an object has another version than the request expects."""


class Missing(Changed):
    """Raised if an object or its bucket does not exist."""


class Object(NamedTuple):
    """The version of an object and the time of its last write, in seconds since 1970.

    A change of the content changes the version. On S3, a write of the same content keeps the version.
    """

    version: str
    time: float


class Store:
    """The objects of one bucket. Retries requests after transient errors, with exponential backoff.

    Every method raises a UserError if the store refuses the request, or after TRAINLESS_BUCKET_SECONDS of transient
    errors.

    Attributes:
      outage: an event that is set after a warning that requests fail, and cleared when a request succeeds or is given
        up. While the event is set, stores do not warn. Two stores of one bucket can share the event, to warn only once.
    """

    def __init__(self, address: str):
        self._address, self._patience = address, seconds(PATIENCE)
        self.outage = threading.Event()

    def list(self, prefix: str) -> dict[str, Object]:
        """Returns {name: object} for all objects whose names begin with `prefix`."""
        return self._repeat(self._list, prefix, needs_object=False)

    def read(self, name: str) -> tuple[bytes, str] | None:
        """Returns the content and the version of an object; None if the object or its bucket does not exist."""
        for _ in range(5):
            try:
                return self._repeat(self._read, name)
            except Missing:
                return None
            except Changed:  # GoogleStore reads version and content in two requests; the object changed in between.
                continue
        raise UserError(f"{self._address}/{name} changed during each of 5 reads: try again later")

    def write(self, name: str, content: bytes, version: str) -> str:
        """Replaces an object if its version is `version`, or creates an object if `version` is "".

        Returns the new version.

        Raises:
          Changed: the object has another version, was deleted or, if `version` is "", already exists. Also raised if an
            earlier attempt of the same call has written the object, but the response was lost.
        """
        return self._repeat(self._write, name, content, version, needs_object=bool(version))

    def download(self, name: str, version: str, path: Path) -> None:
        """Writes the version `version` of an object to a file. Raises Changed if the object has another version."""
        self._repeat(self._download, name, version, path)

    def upload(self, name: str, path: Path) -> str:
        """Uploads a file, whatever the version of the object; returns the new version."""
        try:
            return self._repeat(self._upload, name, path)
        except Changed as error:
            raise UserError(
                f"cannot write {name} to {self._address} ({error}): check that the bucket exists, or try again"
            ) from error

    def delete(self, name: str) -> None:
        """Deletes an object. Does nothing if the object does not exist."""
        with suppress(Missing):
            self._repeat(self._delete, name)

    def _repeat(
        self, request: Callable[..., Any], *arguments: Any, needs_object: bool = True
    ) -> Any:
        """Returns `request(*arguments)`, with retries.

        If `needs_object` is False, only a missing bucket raises Missing. Missing then becomes a UserError.
        """
        try:
            return self._until_answered(request, *arguments)
        except Missing:
            check(needs_object, f"the bucket {self._address} does not exist: check the address")
            raise
        finally:
            self.outage.clear()

    def _until_answered(self, request: Callable[..., Any], *arguments: Any) -> Any:
        begun, pause = time.monotonic(), 1.0
        while True:
            try:
                return request(*arguments)
            except Exception as error:
                status, text = self._status(error), reason_of(error)
                waited = time.monotonic() - begun
                if status in (404, 409, 412):
                    raise (Missing if status == 404 else Changed)(text) from error
                # Raise errors of local files unchanged: the UserError below is about the bucket.
                if status is None and isinstance(error, OSError):
                    raise
                if status not in _TRANSIENT:
                    raise UserError(
                        f"{self._address}: a request failed: {text}; check the address and the credentials"
                    ) from error
                if waited >= self._patience:
                    raise UserError(
                        f"requests to {self._address} have failed for {waited:.0f} s ({text}): check the"
                        " network, or try again later"
                    ) from error
                # Do not warn of the first error: servers close idle connections.
                if pause == 2 and not self.outage.is_set():
                    self.outage.set()
                    print(
                        f"warning: requests to {self._address} fail ({text}); retrying for {self._patience} s",
                        file=sys.stderr,
                        flush=True,
                    )
                # Random pauses spread the retries of several processes.
                time.sleep(min(pause * random.uniform(0.5, 1), self._patience - waited))
                pause = min(2 * pause, 30)

    def _status(self, error: Exception) -> int | None:
        """Returns the HTTP status of `error`: 503 if the store did not respond, None if `error` has no HTTP status."""
        raise NotImplementedError


class GoogleStore(Store):
    """A bucket of Google Cloud Storage. The version of an object is its generation number."""

    def __init__(self, bucket: str):
        from google.api_core.exceptions import GoogleAPICallError
        from google.auth.exceptions import GoogleAuthError, TransportError
        from google.cloud.storage import Client
        from requests import RequestException, exceptions

        super().__init__(f"gs://{bucket}")
        self._answers = GoogleAPICallError
        self._silences = RequestException, TransportError
        self._malformed = (
            exceptions.InvalidURL,
            exceptions.InvalidSchema,
            exceptions.MissingSchema,
        )
        try:
            self._client = Client(project=None)  # Requests for objects need no project.
            self._bucket = self._client.bucket(bucket)
        except (GoogleAuthError, OSError, ValueError) as error:
            raise UserError(
                f"{self._address} cannot be opened: {error} (check the address and GOOGLE_APPLICATION_CREDENTIALS)"
            ) from error
        self._once = {"retry": None, "timeout": (_CONNECT, _ANSWER)}

    def _status(self, error: Exception) -> int | None:
        # `_silences` contains RequestException, the base class of all `_malformed`. So check for `_malformed` first:
        # a request to a malformed address must not be retried.
        if isinstance(error, self._malformed):
            raise UserError(
                f"{self._address} cannot be reached: {error} (check STORAGE_EMULATOR_HOST and HTTPS_PROXY)"
            ) from error
        if isinstance(error, self._silences):
            return 503
        return error.code if isinstance(error, self._answers) else None

    def _list(self, prefix: str) -> dict[str, Object]:
        found = self._client.list_blobs(self._bucket, prefix=prefix, **self._once)
        return {blob.name: Object(str(blob.generation), blob.updated.timestamp()) for blob in found}

    def _read(self, name: str) -> tuple[bytes, str] | None:
        blob = self._bucket.get_blob(name, **self._once)
        if blob is None:
            return None
        version = blob.generation  # read now, because the download changes the fields of the blob
        return blob.download_as_bytes(if_generation_match=version, **self._once), str(version)

    def _write(self, name: str, content: bytes, version: str) -> str:
        blob, kind = self._bucket.blob(name), "application/octet-stream"
        blob.upload_from_string(content, kind, if_generation_match=int(version or 0), **self._once)
        return str(blob.generation)

    def _download(self, name: str, version: str, path: Path) -> None:
        blob = self._bucket.blob(name)
        blob.download_to_filename(str(path), if_generation_match=int(version), **self._once)

    def _upload(self, name: str, path: Path) -> str:
        blob = self._bucket.blob(name)
        blob.upload_from_filename(str(path), **self._once)
        return str(blob.generation)

    def _delete(self, name: str) -> None:
        self._bucket.blob(name).delete(**self._once)


class S3Store(Store):
    """A bucket of S3, or of a store with the same interface. The version of an object is its ETag.

    Uploads each file in one request, which S3 refuses for more than 5 GB. Checkpoints stay below this limit, because
    orbax splits them into files of about 2 GiB.
    """

    def __init__(self, bucket: str):
        import boto3
        from botocore import exceptions
        from botocore.config import Config

        super().__init__(f"s3://{bucket}")
        self._answers = exceptions.ClientError
        self._silences = (
            exceptions.HTTPClientError,
            exceptions.ConnectionError,
            exceptions.IncompleteReadError,
        )
        once = Config(
            retries={"total_max_attempts": 1}, connect_timeout=_CONNECT, read_timeout=_ANSWER
        )
        try:
            self._client = boto3.client("s3", config=once)
        except (exceptions.BotoCoreError, ValueError) as error:
            raise UserError(
                f"{self._address} cannot be opened: {error} (check AWS_ENDPOINT_URL, AWS_PROFILE and the AWS"
                " configuration)"
            ) from error
        self._bucket = bucket

    def _status(self, error: Exception) -> int | None:
        if isinstance(error, self._silences):
            return 503
        known = isinstance(error, self._answers)
        return error.response["ResponseMetadata"]["HTTPStatusCode"] if known else None

    def _list(self, prefix: str) -> dict[str, Object]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=prefix
        )
        return {
            found["Key"]: Object(found["ETag"], found["LastModified"].timestamp())
            for page in pages
            for found in page.get("Contents", ())
        }

    def _read(self, name: str) -> tuple[bytes, str]:
        found = self._client.get_object(Bucket=self._bucket, Key=name)
        return found["Body"].read(), found["ETag"]

    def _write(self, name: str, content: bytes, version: str) -> str:
        condition = {"IfMatch": version} if version else {"IfNoneMatch": "*"}
        found = self._client.put_object(Bucket=self._bucket, Key=name, Body=content, **condition)
        return found["ETag"]

    def _download(self, name: str, version: str, path: Path) -> None:
        found = self._client.get_object(Bucket=self._bucket, Key=name, IfMatch=version)
        with path.open("wb") as file:
            shutil.copyfileobj(found["Body"], file)

    def _upload(self, name: str, path: Path) -> str:
        with path.open("rb") as file:
            return self._client.put_object(Bucket=self._bucket, Key=name, Body=file)["ETag"]

    def _delete(self, name: str) -> None:
        self._client.delete_object(Bucket=self._bucket, Key=name)


def open_store(address: str) -> tuple[Store, str]:
    """Returns the store of the bucket of an address, and the path of the address in the bucket.

    Raises a UserError if the Python package for the store is missing, or if the store cannot be opened.
    """
    scheme, _, place = address.partition("://")
    bucket, _, name = place.partition("/")
    stores = {"gs": (GoogleStore, "google-cloud-storage", "gcs"), "s3": (S3Store, "boto3", "s3")}
    kind, package, extra = stores[scheme]
    try:
        return kind(bucket), name
    except ImportError as error:
        otherwise = f"install this project with its extra [{extra}]"
        raise missing_package(f"{scheme}://", package, error, otherwise) from error
