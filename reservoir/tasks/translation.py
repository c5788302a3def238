"""Translation: training by teacher forcing with label smoothing, evaluation by the BLEU of beam search."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common import sharding
from common.config import check_choice, check_least
from common.data.batches import iterate
from common.data.buckets import BucketedBatches, check_buckets, evaluation_batches, rows_of
from common.data.cache import fingerprint
from common.data.corpus import TokenizedCorpus, tokenize_corpus
from common.data.special_ids import BOS, EOS, PAD
from common.data.tokenizer import Tokenizer
from common.decode.rows import by_rows, gather_weights
from common.errors import check
from common.metrics.translations import TOKENIZERS as BLEU_TOKENIZERS
from common.metrics.translations import Translations
from common.model.loss import cross_entropy
from common.runtime.processes import is_main
from common.train.evaluate import PerExample
from common.train.prefetch import put
from common.train.saved_tokenizer import save_tokenizer
from common.train.task import Batch, BatchSpec, Decoding, ModelState, Task, integers
from common.variables import AbstractModel, Params
from reservoir import kinds
from reservoir.beam import Search, beam_search
from reservoir.encoder_decoder import EncoderDecoder
from reservoir.model import translator as build
from reservoir.parallel_text import ParallelText, build_tokenizers, load_parallel
from reservoir.skipping import Backskipping
from reservoir.transformer_fields import check_transformer

TOKENIZERS = ("source_tokenizer.npz", "target_tokenizer.npz")


def validate(config: ConfigDict) -> None:
    """Checks the configuration of a translator.

    Raises:
      UserError: a field has an invalid value.
    """
    model, data = config.model, config.data
    check_transformer(model)
    check(
        0 <= config.train.label_smoothing < 1,
        "--config.train.label_smoothing must be at least 0 and below 1, got"
        f" {config.train.label_smoothing}",
    )
    widest = {}
    for group, buckets in (("data", data.buckets), ("eval", config.eval.buckets)):
        check_buckets(f"--config.{group}.buckets", buckets)
        if limited(config) and max(buckets) > model.max_length:
            widest[f"--config.{group}.buckets"] = max(buckets)
    reach = " and ".join(f"{option} up to {length} tokens" for option, length in widest.items())
    longest = max(config.eval.buckets)
    enough = max(*widest.values(), search_of(config).longest(longest), 0)
    check(
        not widest,
        f"the model has --config.model.max_length={model.max_length} positions, too few for {reach}: use buckets of at"
        f" most {model.max_length} tokens, or set --config.model.max_length={enough}, which is also enough for the"
        f" translations of sentences of up to {longest} tokens",
    )
    check_choice("--config.data.dictionaries", data.dictionaries, ("shared", "separate"))
    check_choice("--config.eval.tokenize", config.eval.tokenize, BLEU_TOKENIZERS)
    check(
        config.eval.sentences >= 0,
        f"--config.eval.sentences must be at least 0 (0: all sentences), got {config.eval.sentences}",
    )
    check_least(config, ("data.tokens_per_batch", "eval.tokens_per_batch"))
    check_least(config, ("data.vocab_size",), 8)
    check_least(config, ("decode.beams", "decode.extra"))
    check_least(config, ("decode.length_penalty", "decode.ratio"), 0)


def limited(config: ConfigDict) -> bool:
    """Returns whether the model has parameters for each position, so that `model.max_length` limits sentences."""
    kind = kinds.find(config.model.reservoir)
    return config.model.positions == "learned" or (kind is not None and kind.fixed_length)


def search_of(config: ConfigDict) -> Search:
    decode = config.decode
    return Search(decode.beams, decode.length_penalty, decode.ratio, decode.extra)


def search_rows(abstract_model: AbstractModel, search: Search) -> Callable:
    """Returns the beam search: a function (trainable, frozen, batch) -> (ids_B, best translations `tokens_BT`)."""

    def decode(trainable: Params, frozen: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        model = abstract_model.build(trainable, frozen)
        context = model.encode(batch["source"])
        rows, width = batch["source"].shape
        longest = search.longest(width)
        limits_B = (search.ratio * context.encoded_lengths_B).astype(jnp.int32) + search.extra
        found, _ = beam_search(
            lambda last, cache, index: model.step(last, cache, index, context),
            model.cache(rows * search.beams, longest, context),
            limits_B,
            longest=longest,
            search=search,
            bos=BOS,
            eos=EOS,
            never=(PAD, BOS),
        )
        return batch["ids"], found[:, 0]

    return decode


def compiled_search(abstract_model: AbstractModel, search: Search, mesh: Mesh) -> Callable:
    """Returns the jitted function of `search_rows`. Each device searches its own rows. The outputs are replicated."""
    apply = by_rows(search_rows(abstract_model, search), mesh)
    return jax.jit(apply, out_shardings=sharding.replicated(mesh))


class Translator:
    """Translates a corpus by beam search."""

    def __init__(
        self,
        config: ConfigDict,
        tokenizers: tuple[Tokenizer, Tokenizer],
        mesh: Mesh,
        search: Search,
    ):
        self.config, self.mesh, self.search = config, mesh, search
        self.source_tokenizer, self.target_tokenizer = tokenizers
        self._gather: Callable | None = None
        self._search: Callable | None = None

    def batches(self, source: TokenizedCorpus, target: TokenizedCorpus | None) -> Iterator[Batch]:
        """Returns batches that together contain every sentence once. A process gets only its rows of each batch."""
        return evaluation_batches(
            source,
            target,
            buckets=self.config.eval.buckets,
            tokens_per_batch=self.config.eval.tokens_per_batch,
            multiple=self.mesh.size,
        )

    def check_positions(
        self, source: TokenizedCorpus, target: TokenizedCorpus | None = None
    ) -> None:
        """Checks that sentences and translations fit into `model.max_length` positions, if the model has this limit.

        Raises:
          UserError: a sentence is longer than `model.max_length`, or a translation may become longer.
        """
        longest = int(source.lengths.max()) + 1
        needed = {
            "the longest source sentence": longest,
            "the translation of the longest source sentence": self.search.longest(longest),
        }
        if target is not None:
            needed["the longest reference"] = int(target.lengths.max()) + 1
        what = max(needed, key=needed.__getitem__)
        maximum = self.config.model.max_length
        fields = " or a smaller --config.decode.ratio or --config.decode.extra"
        check(
            not limited(self.config) or needed[what] <= maximum,
            f"{what} needs up to {needed[what]} positions, but the model has --config.model.max_length={maximum};"
            f" shorten the text, or train with --config.model.max_length={needed[what]}"
            f"{fields if what.startswith('the translation') else ''}",
        )

    def translate_corpus(self, values: ModelState, source: TokenizedCorpus) -> list[str]:
        """Returns the translation of every sentence of a corpus, in order.

        Raises:
          UserError: `check_positions` fails.
        """
        self.check_positions(source)
        if self._search is None:
            self._gather = gather_weights(values.abstract_model, self.mesh)
            self._search = compiled_search(values.abstract_model, self.search, self.mesh)
        weights = self._gather(values.trainable, values.frozen)
        tokens: list[list[int]] = [[]] * len(source)
        for batch in self.batches(source, None):
            values.interruption()
            ids, found = self._search(*weights, put(batch, self.mesh))
            for number, row in zip(np.asarray(ids), np.asarray(found), strict=True):
                if number >= 0:
                    tokens[number] = row.tolist()
        return self.target_tokenizer.decode(tokens)


class Translation(Backskipping, Task):
    """Translation with a label-smoothed cross-entropy loss, validated by BLEU.

    Args:
      read_data: False makes a task without texts, for `launch.plan`. The vocabularies then have the maximum size,
        `data.vocab_size`.

    Raises:
      UserError: the data is invalid.
    """

    objective, mode, unit = "bleu", "max", "target tokens"

    def __init__(self, config: ConfigDict, mesh: Mesh, *, read_data: bool = True):
        self.config, self.mesh = config, mesh
        self._vocabularies = config.data.vocab_size, config.data.vocab_size
        self._losses = PerExample(_losses)
        if read_data:
            self._read_data()

    def _read_data(self) -> None:
        config = self.config
        self.texts = {
            split: load_parallel(config.data, split) for split in ("train", "valid", "test")
        }
        limit = config.eval.sentences
        if limit:
            valid = self.texts["valid"]
            self.texts["valid"] = ParallelText(valid.source[:limit], valid.target[:limit])
        cache = Path(os.path.expanduser(config.data.cache_dir))
        self.tokenizers = build_tokenizers(config.data, self.texts["train"], cache)
        source, target = self.tokenizers
        self._vocabularies = source.size, target.size
        self.translator = Translator(config, self.tokenizers, self.mesh, search_of(config))
        self._corpora = {split: self._tokenize(split, cache) for split in self.texts}
        for split in ("valid", "test"):
            self.translator.check_positions(*self._corpora[split])
        self.training_batches = self._bucket(*self._corpora["train"])
        if is_main():
            self._print_notes()

    def _print_notes(self) -> None:
        """Prints how many pairs are too long for training, and how many validation and test pairs are in training."""
        train, dropped = self.texts["train"], self.training_batches.dropped
        if dropped:
            longest = max(int(corpus.needed.max()) for corpus in self._corpora["train"])
            print(
                "number of training pairs left out because they are longer than the largest of --config.data.buckets,"
                f" {max(self.config.data.buckets)} tokens: {dropped:,} of {len(train):,}; a bucket of {longest} tokens"
                " would fit all"
            )
        for split in ("valid", "test"):
            text = self.texts[split]
            if repeated := text.repeated(train):
                print(
                    f"number of pairs of split {split} that are also training pairs: {repeated:,} of {len(text):,}"
                )

    def build(self, rngs: nnx.Rngs) -> EncoderDecoder:
        return build(self.config.model, *self._vocabularies, rngs=rngs)

    def loss(
        self, model: EncoderDecoder, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        return teacher_forcing(model, batch, key, self.config.train.label_smoothing)

    def batch_spec(self, multiple: int) -> BatchSpec:
        length = max(self.config.data.buckets)
        rows = rows_of(length, self.config.data.tokens_per_batch, multiple)
        pairs = dict.fromkeys(("source", "target_inputs", "target_outputs"), integers(rows, length))
        return BatchSpec(pairs | {"ids": integers(rows)}, rows * length)

    def decoding(self, abstract_model: AbstractModel) -> Decoding:
        """Returns the beam search of a batch in the largest evaluation bucket, to compile the search without data.

        `Decoding.tokens` assumes that the weights are gathered for each batch, although `translate_corpus` gathers them
        once for all batches.
        """
        search, length = search_of(self.config), max(self.config.eval.buckets)
        longest = search.longest(length)
        rows = rows_of(length, self.config.eval.tokens_per_batch, self.mesh.size)
        batch = {"source": integers(rows, length), "ids": integers(rows)}
        program = compiled_search(abstract_model, search, self.mesh)
        return Decoding(program, search_rows(abstract_model, search), (batch,), longest, longest)

    def _tokenize(self, split: str, cache: Path) -> tuple[TokenizedCorpus, TokenizedCorpus]:
        text, (source, target) = self.texts[split], self.tokenizers
        sources = tokenize_corpus(text.source, source, cache)
        return sources, tokenize_corpus(text.target, target, cache)

    def _bucket(self, source: TokenizedCorpus, target: TokenizedCorpus) -> BucketedBatches:
        data = self.config.data
        return BucketedBatches(
            source,
            target,
            buckets=data.buckets,
            tokens_per_batch=data.tokens_per_batch,
            multiple=sharding.num_batch_shards(self.mesh) * self.config.train.accumulate,
            seed=self.config.seed,
        )

    @property
    def batches_per_epoch(self) -> float:
        return self.training_batches.batches_per_epoch

    def batches(self, start: dict | None) -> Iterator[tuple[Batch, dict]]:
        return iterate(self.training_batches, start)

    def batch_samples(self) -> Iterator[Batch]:
        return self.training_batches.samples()

    def predict(self, values: ModelState, split: str) -> Translations:
        """Returns the beam-search translations of a split, and the teacher-forcing loss of each reference in nats."""
        (source, target), text = self._corpora[split], self.texts[split]
        hypotheses = self.translator.translate_corpus(values, source)
        losses = self._losses(values, self.translator.batches(source, target), len(source))
        metric = self.config.eval
        return Translations(
            fingerprint(text.source, text.target),
            tuple(hypotheses),
            tuple(text.target),
            losses["nats"],
            losses["tokens"],
            metric.lowercase,
            metric.tokenize,
        )

    def fingerprints(self) -> dict[str, str]:
        splits = {
            f"the {split} split": fingerprint([side.fingerprint for side in corpora])
            for split, corpora in self._corpora.items()
        }
        source, target = (tokenizer.fingerprint for tokenizer in self.tokenizers)
        return splits | {"the source tokenizer": source, "the target tokenizer": target}

    def save(self, workdir: Path) -> None:
        for tokenizer, name in zip(self.tokenizers, TOKENIZERS, strict=True):
            save_tokenizer(tokenizer, workdir / name)


def teacher_forcing(
    model: EncoderDecoder, batch: Batch, key: jax.Array | None, smoothing: float
) -> tuple[jax.Array, jax.Array]:
    """Returns the label-smoothed cross-entropy, summed over target tokens, and the number of target tokens."""
    loss_BT, weights_BT = _token_losses(model, batch, key, smoothing)
    return jnp.sum(loss_BT), jnp.sum(weights_BT)


def _token_losses(
    model: EncoderDecoder, batch: Batch, key: jax.Array | None, smoothing: float
) -> tuple[jax.Array, jax.Array]:
    """Returns the label-smoothed cross-entropy and the weight 1 of each target token, (B, T) each; 0 at padding."""
    logits_BTV = model(batch["source"], batch["target_inputs"], key)
    targets_BT = batch["target_outputs"]
    weights_BT = (targets_BT != PAD).astype(jnp.float32)
    return cross_entropy(logits_BTV, targets_BT, smoothing) * weights_BT, weights_BT


def _losses(model: EncoderDecoder, batch: Batch) -> dict[str, jax.Array]:
    loss_BT, weights_BT = _token_losses(model, batch, None, 0.0)
    return {"nats": loss_BT.sum(1), "tokens": weights_BT.sum(1)}
