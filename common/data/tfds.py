"""Reads TFDS data sets without TensorFlow."""

from collections.abc import Iterator
from typing import Any

from common.errors import UserError, check, reason_of

_BLOCK = 10_000
"""Maximum number of examples per read."""


def open_tfds(name: str, split: str, directory: str, package: str) -> tuple[Any, Any]:
    """Returns the builder of a prepared TFDS data set, and the examples of a split, with random access.

    Args:
      directory: data directory of TFDS. "" means TFDS's default.
      package: name of the subpackage of tensorflow_datasets that defines the data set, for the error message.

    Raises:
      UserError: the data set is not prepared or cannot be read.
    """
    import tensorflow_datasets as tfds

    place = directory or None
    try:
        builder = tfds.builder(name, data_dir=place)
        examples = builder.as_data_source(split=split) if builder.is_prepared() else None
    except tfds.core.DatasetNotFoundError:
        examples = None
    except NotImplementedError as error:
        raise UserError(
            f"the files of tfds:{name} in {directory or 'the default TFDS directory'} have no random access: prepare"
            f" {name} with file_format='array_record' in another directory DIR, and set --config.data.tfds_dir=DIR"
        ) from error
    except Exception as error:  # A data set script may raise any type of exception.
        place = "" if split == "all" else f"split {split} of "
        raise UserError(
            f"cannot read {place}--config.data.source=tfds:{name}: {reason_of(error)}; correct the name or the split"
        ) from error
    # The command in the message imports the subpackage, because TFDS without TensorFlow knows only data sets of
    # imported subpackages.
    check(
        examples is not None,
        f"the TFDS data set {name} is not prepared in {directory or 'the default TFDS directory'}; "
        "correct the name, set --config.data.tfds_dir to the directory that has it, or prepare it with: "
        'python -c "import tensorflow_datasets as tfds, '
        f"tensorflow_datasets.{package}; tfds.builder({name!r}, data_dir={place!r}, "
        "file_format='array_record').download_and_prepare()\"",
    )
    return builder, examples


def in_blocks(examples: Any) -> Iterator[list[dict]]:
    """Yields all examples of a TFDS split, in lists of at most `_BLOCK` examples."""
    for start in range(0, len(examples), _BLOCK):
        yield examples.__getitems__(range(start, min(start + _BLOCK, len(examples))))
