"""Objects of Google Cloud Storage and of S3, each through the library of its maker.

The libraries read credentials and endpoints from the environment: GOOGLE_APPLICATION_CREDENTIALS, AWS_PROFILE,
STORAGE_EMULATOR_HOST, AWS_ENDPOINT_URL. The retries of the libraries are off: `Store` retries, so that both stores have
the same timeout and the user is warned.
"""

import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError
from common.runtime.heartbeat import seconds

PATIENCE = "TRAINLESS_BUCKET_SECONDS", 300
"""Variable and default of the seconds after which a store that does not answer counts as gone."""

_CONNECT, _ANSWER = 10, 60
"""Timeouts in seconds of a connection and of an answer."""

_TRANSIENT = (408, 429, 500, 502, 503, 504)
"""HTTP status codes of transient errors. A request without an answer counts as 503."""


class Changed(Exception):
    """The object has another version than the request expects."""


class Missing(Changed):
    """There is no such object."""


class Object(NamedTuple):
    """The version of an object, which every write changes, and the time of this write in seconds since 1970."""

    version: str
    time: float


class Store:
    """The objects of one bucket. Transient errors are retried with exponential backoff.

    Every method raises a UserError if the store refuses the request, or after TRAINLESS_BUCKET_SECONDS of transient
    errors.
    """

    def __init__(self, address: str):
        self._address, self._patience = address, seconds(PATIENCE)

    def list(self, prefix: str) -> dict[str, Object]:
        """Returns name -> object of all objects whose names begin with `prefix`."""
        try:
            return self._repeat(self._list, prefix)
        except Missing as error:
            raise UserError(f"there is no bucket {self._address}") from error

    def read(self, name: str) -> tuple[bytes, str] | None:
        """Returns the content and the version of an object; None if there is no such object."""
        for _ in range(5):
            try:
                return self._repeat(self._read, name)
            except Missing:
                return None
            except Changed:  # between the two requests of `_read`
                continue
        raise UserError(f"{self._address}/{name} changes faster than it can be read")

    def write(self, name: str, content: bytes, version: str) -> str:
        """Replaces the object of this version, "" for a new object; returns the new version.

        Raises:
          Changed: the object has another version. If the answer to the first attempt was lost, the first attempt may
            have written the object.
        """
        return self._repeat(self._write, name, content, version)

    def download(self, name: str, version: str, path: Path) -> None:
        """Writes the object of this version to a file. Raises Changed if there is no such version."""
        self._repeat(self._download, name, version, path)

    def upload(self, name: str, path: Path) -> str:
        """Writes a file to an object of any version; returns the new version."""
        try:
            return self._repeat(self._upload, name, path)
        except Changed as error:
            raise UserError(f"cannot write {name} to {self._address}: {error}") from error

    def delete(self, name: str) -> None:
        """Deletes an object, if there is such an object."""
        try:
            self._repeat(self._delete, name)
        except Missing:
            return

    def _repeat(self, request: Callable[..., Any], *arguments: Any) -> Any:
        begun, pause = time.monotonic(), 1.0
        while True:
            try:
                return request(*arguments)
            except Exception as error:
                status, text = self._status(error), " ".join(str(error).split())[:200]
                waited = time.monotonic() - begun
                if status in (404, 409, 412):
                    raise (Missing if status == 404 else Changed)(text) from error
                if status is None and isinstance(error, OSError):  # of a file on this machine
                    raise
                if status not in _TRANSIENT:
                    raise UserError(f"{self._address} cannot be used: {text}") from error
                if waited + pause > self._patience:
                    raise UserError(
                        f"{self._address} has not answered for {waited:.0f} seconds: {text}"
                    ) from error
                if pause == 2:  # not at the first error: servers close idle connections
                    line = f"{self._address} does not answer ({text}); trying for {self._patience} seconds"
                    print(f"warning: {line}", file=sys.stderr, flush=True)
                # Random pauses spread the retries of several processes.
                time.sleep(pause * random.uniform(0.5, 1))
                pause = min(2 * pause, 30)

    def _status(self, error: Exception) -> int | None:
        """Returns the HTTP status of an error, 503 without an answer; None for an error of another kind."""
        raise NotImplementedError


class GoogleStore(Store):
    """A bucket of Google Cloud Storage; a version is the generation of an object."""

    def __init__(self, bucket: str):
        super().__init__(f"gs://{bucket}")
        try:
            from google.api_core.exceptions import GoogleAPICallError
            from google.auth.exceptions import GoogleAuthError, TransportError
            from google.cloud.storage import Client
            from requests import RequestException
        except ImportError as error:
            raise _lacks("gs", "google-cloud-storage", "gcs") from error
        self._answers = GoogleAPICallError
        self._silences = RequestException, TransportError
        try:
            client = Client(project=None)  # requests of objects need no project
        except GoogleAuthError as error:
            raise UserError(f"{self._address}: {error}") from error
        self._client, self._bucket = client, client.bucket(bucket)
        self._once = {"retry": None, "timeout": (_CONNECT, _ANSWER)}

    def _status(self, error: Exception) -> int | None:
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
        version = blob.generation  # before the download, which replaces the fields of the blob
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
    """A bucket of S3 or of a store with its interface; a version is the ETag of an object.

    A file of more than 5 GB is refused by S3; the files of a checkpoint are smaller.
    """

    def __init__(self, bucket: str):
        super().__init__(f"s3://{bucket}")
        try:
            import boto3
            from botocore import exceptions
            from botocore.config import Config
        except ImportError as error:
            raise _lacks("s3", "boto3", "s3") from error
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
        except exceptions.BotoCoreError as error:
            raise UserError(f"{self._address}: {error}") from error
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
    """Returns the bucket of an address, and the address's name in the bucket."""
    scheme, _, place = address.partition("://")
    bucket, _, name = place.partition("/")
    return {"gs": GoogleStore, "s3": S3Store}[scheme](bucket), name


def _lacks(scheme: str, package: str, extra: str) -> UserError:
    return UserError(
        f"{scheme}:// needs the package {package}: pip install {package}, or install the extra [{extra}]"
    )
