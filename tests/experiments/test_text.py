"""Text: examples of files, the transformer, losses of tokens, translations, and the command."""

from functools import partial
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tasks

from sam_optax.__main__ import main
from sam_optax.experiments.data import text
from sam_optax.experiments.data.dataset import load
from sam_optax.experiments.errors import UserError
from sam_optax.experiments.methods.registry import METHODS
from sam_optax.experiments.networks.registry import ARCHITECTURES
from sam_optax.experiments.networks.transformer import Transformer
from sam_optax.experiments.reporting import results
from sam_optax.experiments.training import measures, translation


class Table(nn.Module):
    """Logits of the next token that depend on the token alone."""

    classes: int = 256

    @nn.compact
    def __call__(self, x, *, train):
        return self.param("table", nn.initializers.zeros, (256, 256))[x]


slow = pytest.mark.slow
pytestmark = pytest.mark.usefixtures("compile_fast")
NUMBERS = {"eins": "one", "zwei": "two", "fünf": "five"}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """The path of 40 pairs."""
    path = tmp_path_factory.mktemp("text") / "pairs.tsv"
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(40):
        words = rng.choice(list(NUMBERS), rng.integers(1, 3))
        lines.append(f"{' '.join(words)}\t{' '.join(NUMBERS[word] for word in words)}\n")
    path.write_text("".join(lines))
    return path


@pytest.fixture(scope="module")
def translated(pairs):
    return load(f"pairs:{pairs}")


# Data.


def test_a_text_is_cut_into_parts_whose_labels_are_the_next_bytes(tmp_path):
    content = "".join(chr(97 + i % 26) for i in range(100)) + "üx"
    (tmp_path / "a.txt").write_text(content)
    dataset = load(f"text:{tmp_path / 'a.txt'}", length=10)
    assert (len(dataset.train.y), len(dataset.test.y), dataset.classes) == (9, 1, 256)
    assert dataset.text
    assert dataset.shape == (10,)
    x, y = (np.concatenate(both) for both in zip(dataset.train, dataset.test, strict=True))
    assert bytes(x.ravel().tolist()) == content.encode()[:100]
    assert bytes(y.ravel().tolist()) == content.encode()[1:101]


def test_without_a_path_it_is_the_text_of_help():
    dataset = load("text")
    assert dataset.shape == (64,)
    assert len(dataset.train.y) > 6000
    assert 'The "assert" statement' in text.decoded(dataset.train.x[:9].ravel())


def test_labels_of_a_pair_are_its_target(tmp_path):
    # A mark of the byte order and empty lines are left out; a quote is a character like others.
    (tmp_path / "a.tsv").write_text('\ufeffab\txyz\n\n"\tü\n\n', encoding="utf-8")
    dataset = load(f"pairs:{tmp_path / 'a.tsv'}")
    end, separator = text.END, text.SEPARATOR
    np.testing.assert_array_equal(dataset.train.x, [[*b"ab", separator, *b"xyz"]])
    np.testing.assert_array_equal(dataset.train.y, [[-1, -1, *b"xyz", end]])
    np.testing.assert_array_equal(dataset.test.x, [[ord('"'), separator, *"ü".encode(), end, end]])
    np.testing.assert_array_equal(dataset.test.y, [[-1, *"ü".encode(), end, -1, -1]])


def test_longer_pairs_are_left_out_and_told(pairs, translated):
    shorter = load(f"pairs:{pairs}", length=12)
    assert shorter.shape == (10,) < translated.shape  # the longest of those that remain
    assert load(f"pairs:{pairs}", length=500).shape == translated.shape
    count = [len(d.train.y) + len(d.test.y) for d in (translated, shorter)]
    assert f"{count[0] - count[1]} pairs of more than 12 bytes (--length)" in shorter.notes[0]


WRONG = {
    "nowhere": ("text:nowhere", b"", "nowhere: cannot be read .no such file"),
    "bytes": ("text:FILE", b"\xff" * 500, "FILE: is not UTF-8"),
    "short": (
        "text:FILE",
        b"a" * 100,
        "FILE: it has 1 examples of 64 bytes; use a longer.*smaller --length",
    ),
    "empty": ("pairs:FILE", b"", "FILE: it has 0 examples .*larger --length"),
    "columns": ("pairs:FILE", b"a\tb\nc\n", "FILE: line 2 has 1 columns; use two"),
    "no target": ("pairs:FILE", b"a\t\n", "FILE: line 1 has 2 columns, one empty; use two"),
    "no path": ("pairs:", b"", "pairs:: unknown data set"),
}


@pytest.mark.parametrize(("spec", "content", "message"), WRONG.values(), ids=WRONG)
def test_files_that_are_no_text_or_pairs(tmp_path, spec, content, message):
    (tmp_path / "FILE").write_bytes(content)
    with pytest.raises(UserError, match=f"--dataset .*{message}"):
        load(spec.replace("FILE", str(tmp_path / "FILE")))


# The network and the measures.


def test_a_position_sees_those_before_it_and_all_of_the_source():
    model = Transformer(classes=256, width=8, depth=1, heads=2)
    plain = jnp.array([[3, 1, 4, 1, 5, 9]])
    variables = jax.jit(partial(model.init, train=False))(jax.random.key(0), plain)
    apply = jax.jit(lambda x: model.apply(variables, x, train=False)[0])

    def seen(tokens, changed):
        """Whether each position's logits change with the token at one position."""
        return jnp.any(apply(tokens) != apply(tokens.at[0, changed].add(1)), axis=1).tolist()

    assert seen(plain, 3) == [False] * 3 + [True] * 3
    pair = plain.at[0, 3].set(text.SEPARATOR)
    assert seen(pair, 2) == [True] * 6
    assert seen(pair, 4) == [False] * 4 + [True] * 2


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_mean_over_the_labelled_tokens(translated, smoothing):
    task = tasks.make(translated, "sam", model=Table(), label_smoothing=smoothing)
    rng = np.random.default_rng(0)
    table = rng.normal(size=(256, 256))
    x, y = (a[:3] for a in translated.train)
    likelihood = jax.nn.log_softmax(table[x])
    expected, right = [], []
    for i in range(3):
        places = np.flatnonzero(y[i] >= 0)
        labels = (1 - smoothing) * np.eye(256)[y[i, places]] + smoothing / 256
        expected.append(-np.mean(np.sum(labels * likelihood[i, places], axis=1)))
        right.append(np.mean(table[x[i, places]].argmax(1) == y[i, places]))
    variables = {"params": {"table": jnp.asarray(table, jnp.float32)}}
    labels = measures.augmentation.smooth(y, 256, smoothing) if smoothing else y
    found, _ = measures.losses(task, variables, (x, labels))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    block = measures.Blocks(x, y, np.array([1.0, 1.0, 0.0], np.float32))
    hits = measures.hits(task, variables, block)["test_accuracy"]
    np.testing.assert_allclose(hits, sum(right[:2]), rtol=1e-6)


@slow
@pytest.mark.sample("sam", "part", "esam", "sam_full", "delta_sam")
@pytest.mark.parametrize("name", METHODS)
def test_every_method_takes_a_step_on_text(translated, name):
    model = Transformer(classes=256, width=8, depth=1, heads=2, dtype=jnp.bfloat16)
    m = 8 if METHODS[name].groups else 16
    task = tasks.make(translated, name, model=model, m=m, optimizer="adam", label_smoothing=0.1)
    take, first, key = tasks.begin(task, name)
    data = jax.tree.map(jnp.asarray, tuple(translated.train))
    batch = tuple(leaf[:16] for leaf in data)
    before, after = jax.eval_shape(lambda: (state := first(), take(key, state, batch, key, data)))
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert jax.tree.leaves(before) == jax.tree.leaves(after)


# Translations.


class Copy:
    """In the place of a network: it writes the source after the separator, and an end."""

    @staticmethod
    def apply(variables, x, *, train):
        separator = jnp.argmax(x == text.SEPARATOR, axis=1)[:, None]
        place = jnp.arange(x.shape[1]) - separator
        copied = jnp.take_along_axis(x, place, axis=1)
        return jax.nn.one_hot(jnp.where(place == separator, text.END, copied), 256)


def test_translations_are_scored_by_bleu():
    sources = ["one two three four five", "six seven eight nine ten eleven", "a b c d e"]
    tokens = [[*s.encode(), text.SEPARATOR, *s.encode(), text.END] for s in sources]
    size = max(map(len, tokens)) - 1
    x, y = np.full((3, size), text.END), np.full((3, size), -1)
    for i, row in enumerate(tokens):
        x[i, : len(row) - 1] = row[:-1]
        y[i, len(sources[i]) : len(row) - 1] = row[len(sources[i]) + 1 :]
    dataset = SimpleNamespace(test=text.Examples(x, y))
    task = SimpleNamespace(dataset=dataset, model=Copy, seeds=(0, 1))
    np.testing.assert_array_equal(translation.translations(task, {}, x)[:2, :-1], x[:2, :-1])
    np.testing.assert_allclose(translation.bleu(task, {"w": np.ones(2)}), [1, 1])
    y[y == ord("t")] = ord("T")
    assert 0.1 < translation.bleu(task, {"w": np.ones(2)})[0] < 0.9


# The command.


@pytest.fixture
def tiny(monkeypatch):
    """The network of text in a size that compiles fast."""
    make = lambda **of: Transformer(**of, width=8, depth=1, heads=2)
    small = ARCHITECTURES["transformer"]._replace(make=make)
    monkeypatch.setitem(ARCHITECTURES, "transformer", small)


@slow
@pytest.mark.usefixtures("tiny")
def test_compare_trains_on_pairs_and_scores_their_translations(capsys, pairs, tmp_path):
    arguments = ["compare", "--dataset", f"pairs:{pairs}", "--methods", "sgd", "sam"]
    arguments += ["--epochs", "3", "--batch-size", "12", "--lr", "0.03", "--m", "6", "--bleu"]
    arguments += ["--sam.rho", "0.05", "--label-smoothing", "0.1", "--seeds", "1"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "36 training and 4 test examples, at most 21 bytes each" in printed
    assert "adam: lr 0.03, schedule cosine, momentum 0.9, beta2 0.999" in printed
    assert "share of the test examples (of text bytes)" in printed
    assert "BLEU" in printed
    found = results.from_json(tmp_path / "results.json")
    assert found["settings"]["model"] == {"value": "transformer", "source": "default"}
    for method in found["methods"]:
        for seed in method["seeds"]:
            losses = seed["curves"]["train_loss"]
            assert losses[-1] < losses[0] < np.log(256) + 1
            assert 0 <= seed["bleu"] <= 1


MISTAKES = {
    "noise": (["--label-noise", "0.4"], "--label-noise 0.4: is not for text, such as pairs:"),
    "flip": (["--flip", "True"], "--flip True: is not for text"),
    "model": (["--model", "mlp"], "--model mlp: is not for text; use --model transformer"),
    "digits": (["--dataset", "digits", "--model", "transformer"], "--model transformer: is for te"),
    "length": (["--dataset", "digits", "--length", "9"], "--length 9: is for --dataset text and p"),
    "size": (["--image-size", "9"], "--image-size 9: needs --dataset hf:NAME_OR_PATH, not pairs:"),
    "nesterov": (
        ["--nesterov", "True"],
        "--nesterov True: is for --optimizer sgd and rmsprop, not",
    ),
    "beta2": (["--optimizer", "sgd", "--beta2", "0.9"], "--beta2 0.9: is for --optimizer adam and"),
    "bleu": (["--dataset", "text", "--bleu"], "--bleu: needs --dataset pairs:PATH, not text"),
    "preset": (["--preset", "asam-iwslt14", "--devices", "1"], ""),
}


@pytest.mark.parametrize(("more", "message"), MISTAKES.values(), ids=MISTAKES)
def test_what_is_not_for_text_is_told(capsys, trainer, pairs, more, message):
    arguments = ["compare", "--dataset", f"pairs:{pairs}", "--batch-size", "9", *more]
    assert main(arguments) == (2 if message else 0)
    assert capsys.readouterr().err.startswith(f"sam_optax: {message}" if message else "Not printed")


def test_the_table_tells_the_bytes_of_an_example(capsys, trainer):
    assert main(["train", "--dataset", "text", "--length", "99"]) == 0
    assert "test examples, 99 bytes each" in capsys.readouterr().out


def test_bleu_without_its_library_says_what_to_install(capsys, trainer, pairs, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["compare", "--dataset", f"pairs:{pairs}", "--batch-size", "9", "--bleu"]) == 2
    assert 'pip install "sam_optax[text]"' in capsys.readouterr().err
