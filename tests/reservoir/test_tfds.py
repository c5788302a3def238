"""TFDS data sets, read without TensorFlow."""

import sys

import pytest

from common.errors import UserError
from reservoir.parallel_text import ParallelText, load_parallel
from tests.data.helpers import settings


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Returns a TFDS directory with the data set tiny_pairs."""
    import tensorflow_datasets as tfds

    # The class is not registered in TFDS, as if another program had prepared the data set.
    class TinyPairs(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        # If a class is in a module of a package, TFDS imports importlib_resources, which may be missing. So name a
        # module that is not in a package.
        __module__ = "tiny_pairs"
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = tfds.features.Translation(languages=("de", "en"))
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, _):
            return {
                "train": self._generate_examples(7),
                "validation": self._generate_examples(2),
            }

        def _generate_examples(self, count):
            for i in range(count):
                yield i, {"de": "" if i == 3 else f"größer als {i}", "en": f"greater than {i}"}

    path = tmp_path_factory.mktemp("tfds")
    TinyPairs(data_dir=path, file_format="array_record").download_and_prepare()
    return path


@pytest.fixture
def data(directory):
    data = settings("tfds:tiny_pairs", tfds_dir=str(directory))
    data.splits.valid = "validation"
    return data


def fault(data, split: str = "train") -> str:
    with pytest.raises(UserError) as caught:
        load_parallel(data, split)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_pairs_are_read_without_tensorflow(data):
    text = load_parallel(data, "train")
    expected = {(f"größer als {i}", f"greater than {i}") for i in range(7) if i != 3}
    assert set(zip(text.source, text.target, strict=True)) == expected
    assert load_parallel(data, "train") == text
    assert "tensorflow" not in sys.modules


def test_text_does_not_depend_on_the_size_of_read_blocks(data, monkeypatch):
    whole = load_parallel(data, "train")
    monkeypatch.setattr("common.data.tfds._BLOCK", 2)
    assert load_parallel(data, "train") == whole


def test_splits_and_slices(data):
    assert len(load_parallel(data, "valid")) == 2
    data.splits.valid = "train[:3]"
    assert len(load_parallel(data, "valid")) == 3


def test_languages_choose_the_direction(data):
    forward = load_parallel(data, "train")
    data.source_language, data.target_language = "en", "de"
    assert load_parallel(data, "train") == ParallelText(forward.target, forward.source)


def test_unknown_split_error_lists_the_splits(data):
    data.splits.test = "test2016"
    message = fault(data, "test")
    assert "test2016" in message
    assert "validation" in message


def test_unknown_language_error_lists_the_languages(data):
    data.target_language = "fr"
    message = fault(data)
    assert "de, en" in message
    assert "fr" in message


@pytest.mark.parametrize("name", ["wmt14_translate/de-en", "no_such_pairs"])
def test_unprepared_data_set_error_has_the_command(data, name):
    data.source = f"tfds:{name}"
    message = fault(data)
    assert "download_and_prepare()" in message
    assert f"tfds.builder('{name}', data_dir='{data.tfds_dir}'" in message


def test_preparation_command_finds_translation_sets(data, directory):
    """Without TensorFlow, TFDS finds translation data sets only after the import of `tensorflow_datasets.translate`."""
    import tensorflow_datasets as tfds
    import tensorflow_datasets.translate

    builder = tfds.builder("wmt14_translate/de-en", data_dir=directory, file_format="array_record")
    assert not builder.is_prepared()
    data.source = "tfds:wmt14_translate/de-en"
    assert "download_and_prepare()" in fault(data)


def test_data_set_without_random_access_raises_user_error(data, monkeypatch):
    import tensorflow_datasets as tfds

    class Tfrecord:
        is_prepared = staticmethod(lambda: True)

        def as_data_source(self, split):
            raise NotImplementedError(f"Random access data source for {split} is not supported")

    monkeypatch.setattr(tfds, "builder", lambda *_, **__: Tfrecord())
    assert "with file_format='array_record' in another directory DIR, and set" in fault(data)


def test_invalid_tfds_name_raises_user_error(data):
    data.source = "tfds:tiny pairs!"
    assert "tiny pairs!" in fault(data)
