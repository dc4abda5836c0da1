"""Data sets of the Hugging Face library, from folders."""

import io
import re

import numpy as np
import pytest
from PIL import Image

from sam_optax.__main__ import main
from sam_optax.experiments.data import images as reading
from sam_optax.experiments.data.dataset import load
from sam_optax.experiments.errors import UserError

datasets = pytest.importorskip("datasets")
pyarrow = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.parquet")  # as an attribute


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def encoded(image, kind="PNG"):
    file = io.BytesIO()
    image.save(file, kind)
    return {"bytes": file.getvalue(), "path": None}


def noise(n, shape, seed=0):
    """Images of one size, as Pillow's."""
    pixels = np.random.default_rng(seed).integers(0, 256, (n, *shape), np.uint8)
    return [Image.fromarray(image) for image in pixels]


def rows(images, labels, names=("cat", "dog", "emu"), image="image", label="label"):
    """A split of images."""
    features = datasets.Features(
        {image: datasets.Image(), label: datasets.ClassLabel(names=list(names))}
    )
    cells = [i if i is None or isinstance(i, dict) else encoded(i) for i in images]
    return datasets.Dataset.from_dict({image: cells, label: labels}, features=features)


def save(path, **splits):
    datasets.DatasetDict(splits).save_to_disk(path)
    return f"hf:{path}"


def small(n, seed, **options):
    return rows(noise(n, (8, 6, 3), seed), np.arange(n) % 3, **options)


def pixels(images):
    return np.stack([np.asarray(image) for image in images])


def test_images_of_one_size_are_kept_as_they_are(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(reading, "_CHUNK", 5)
    spec = save(tmp_path / "saved", train=small(12, 0), test=small(6, 1))
    capfd.readouterr()
    dataset = load(spec)
    assert capfd.readouterr() == ("", "")
    np.testing.assert_array_equal(dataset.train.x, pixels(noise(12, (8, 6, 3))))
    np.testing.assert_array_equal(dataset.test.x, pixels(noise(6, (8, 6, 3), 1)))
    np.testing.assert_array_equal(dataset.test.y, np.arange(6) % 3)
    assert (dataset.name, dataset.classes, dataset.shape) == (spec, 3, (8, 6, 3))
    assert (dataset.train.x.dtype, dataset.train.y.dtype) == (np.uint8, np.int32)
    low, high = dataset.train.x.min(), dataset.train.x.max()
    understood = f"examples of 8×6×3 uint8 in [{low}, {high}], 3 classes (cat, dog, emu)"
    assert dataset.described == f"train 12, test 6 {understood}"
    assert dataset.notes == ()
    np.testing.assert_allclose(dataset.mean, (dataset.train.x / 255).mean((0, 1, 2)))
    np.testing.assert_allclose(dataset.std, (dataset.train.x / 255).std((0, 1, 2)))
    other = save(tmp_path / "other", train=small(12, 0), test=small(6, 2))
    assert load(spec).sha256 == dataset.sha256 != load(other).sha256


LABELS = {
    "strings": (["bee", "ant", "bee", "cow"], [1, 0, 1, 2]),
    "numbers": ([10, -1, 2, 10], [2, 0, 1, 2]),
    "booleans": ([True, False, False, True], [1, 0, 0, 1]),
}


@pytest.mark.parametrize(("labels", "expected"), LABELS.values(), ids=LABELS)
def test_labels_of_any_kind_in_tables_are_numbered_in_sorted_order(labels, expected, tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    for split in ("train", "test"):
        cells = [encoded(image) for image in noise(4, (5, 5, 3))]
        part = datasets.Dataset.from_dict({"img": cells, "labels": labels})
        part.to_parquet(folder / f"{split}.parquet")
    with pytest.raises(UserError, match=r"images nor numbers, only img \(.*give --image-column\."):
        load(f"hf:{folder}", label_column="labels")
    dataset = load(f"hf:{folder}", image_column="img", label_column="labels")
    for part in (dataset.train, dataset.test):
        np.testing.assert_array_equal(part.x, pixels(noise(4, (5, 5, 3))))
        np.testing.assert_array_equal(part.y, expected)
    assert ("(ant, bee, cow)" in dataset.described) == (labels[0] == "bee")


def blank(mode):
    return Image.new(mode, (2, 1))


PALETTE = blank("P")
PALETTE.putpalette([0, 0, 0, 200, 0, 0])
PALETTE.putpixel((1, 0), 1)
PALETTE.info["transparency"] = 1
RGBA = Image.fromarray(np.uint8([[[0, 0, 0, 255], [9, 9, 9, 0]]]))
LA = Image.fromarray(np.uint8([[[0, 255], [9, 0]]]), "LA")
MODES = {  # two images and their pixels
    "grey": (blank("1"), blank("L"), [[0], [0]], [[0], [0]]),
    "one is coloured": (blank("L"), blank("RGB"), [[0] * 3] * 2, [[0] * 3] * 2),
    "inks": (blank("CMYK"), blank("L"), [[255] * 3] * 2, [[0] * 3] * 2),
    "transparent": (PALETTE, RGBA, [[0] * 3, [255] * 3], [[0] * 3, [255] * 3]),
    "transparent grey": (LA, blank("L"), [[0], [255]], [[0], [0]]),
}


@pytest.mark.parametrize(("one", "other", *"xy"), MODES.values(), ids=MODES)
def test_pixels_of_all_modes(one, other, x, y, tmp_path):
    """Transparent ones are white, and there is one channel unless some image is coloured."""
    cells = [encoded(i, "TIFF" if i.mode == "CMYK" else "PNG") for i in (one, other)]
    part = rows(cells, [0, 1])
    dataset = load(save(tmp_path / "a", train=part, test=part))
    np.testing.assert_array_equal(dataset.train.x, [[x], [y]])


def tree(root, *folders, n=5):
    """Folders of images."""
    for seed, folder in enumerate(folders):
        (root / folder).mkdir(parents=True)
        for i, image in enumerate(noise(n, (5, 4, 3), seed)):
            image.save(root / folder / f"{i}.png")
    return f"hf:{root}"


@pytest.mark.parametrize("orientation", [3, 6])
def test_photographs_are_upright_as_datasets_decodes_them(orientation, tmp_path):
    spec = tree(tmp_path / "a", "cat", "dog")
    for path in (tmp_path / "a").rglob("*.png"):
        image = Image.open(path)
        exif = image.getexif()
        exif[0x0112] = orientation
        image.save(path, exif=exif)
    dataset = load(spec)
    theirs = datasets.load_dataset(str(tmp_path / "a"))["train"]
    found = sorted(map(bytes, (*dataset.train.x, *dataset.test.x)))
    assert found == sorted(np.asarray(row["image"]).tobytes() for row in theirs)
    assert dataset.shape == ((4, 5, 3) if orientation > 4 else (5, 4, 3))


def test_what_is_left_out_is_named(tmp_path):
    spec = tree(tmp_path / "a", "train/cat", "train/dog", "test/cat", "test/dog", "val/cat")
    link = tmp_path / "a" / "train" / "cat" / "6.png"
    link.symlink_to(tmp_path / "a" / "val" / "cat" / "0.png")
    for name in ("notes.txt", "train/dog/1.heic", ".hidden"):
        (tmp_path / "a" / name).touch()
    dataset = load(spec)
    assert (len(dataset.train.y), len(dataset.test.y)) == (11, 10)
    assert dataset.notes == (
        "Files that are not read: 2, such as notes.txt.",
        "Splits that are left out: validation (5).",
    )


def test_too_little_memory_for_an_image_is_no_damage_of_it(tmp_path, monkeypatch):
    def fail(*args, **options):
        raise MemoryError

    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(MemoryError):
        load(tree(tmp_path / "a", "cat", "dog"))


@pytest.mark.parametrize("place", ["a", "far", "https://127.0.0.1:9"])
def test_files_outside_the_folder_are_not_opened(place, tmp_path):
    """Tables may name images in place of their bytes, those of others any file."""
    for folder in ("a/.images", "far/.images"):
        tree(tmp_path / folder, "", n=1)
    path = f"{place if ':' in place else tmp_path / place}/.images/0.png"
    part = rows([{"bytes": None, "path": path}] * 4, [0, 1] * 2)
    for split in ("train", "test"):
        pyarrow.parquet.write_table(part.data.table, tmp_path / "a" / f"{split}.parquet")
    if place == "a":
        assert load(f"hf:{tmp_path / 'a'}").shape == (5, 4, 3)
        return
    with pytest.raises(UserError, match=r"\(0.png\) cannot be read .*outside the folder of the"):
        load(f"hf:{tmp_path / 'a'}")


@pytest.mark.parametrize("name", ["a b", "sales_$2020", "sweep[rho=0.1]", "\udcff"])
def test_any_path_will_do_for_data_that_were_saved(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    save(tmp_path / "plain", train=small(6, 0), test=small(3, 1))
    (tmp_path / "plain").rename(tmp_path / name)
    assert load(f"hf:~/{name}").shape == (8, 6, 3)


def test_folders_with_brackets_are_for_saved_data_alone(tmp_path):
    with pytest.raises(UserError, match="cannot read folders with"):
        load(tree(tmp_path / "a[b]", "cat", "dog"))


def table(n=10, **columns):
    rng = np.random.default_rng(n)
    found = {"age": rng.normal(40, 9, n), "rooms": np.arange(n), "rich": np.arange(n) % 2 == 0}
    found |= {"label": np.arange(n) % 3, **columns}
    return datasets.Dataset.from_dict({k: v for k, v in found.items() if v is not None})


def test_columns_of_numbers_are_vectors(tmp_path):
    text = list("abcdefghij")
    spec = save(tmp_path / "a", train=table(name=text), test=table(5, name=text[:5]))
    dataset = load(spec, label_column="label")
    expected = np.stack([table()[k] for k in ("age", "rooms", "rich")], 1).astype(float)
    mean, std = expected.mean(0), expected.std(0)
    np.testing.assert_allclose(dataset.train.x, (expected - mean) / std, rtol=1e-4, atol=1e-6)
    assert (dataset.shape, dataset.classes, dataset.mean) == ((3,), 3, None)
    assert dataset.notes == ("Columns that are left out: name.",)
    assert load(spec, label_column="rich").classes == 2
    with pytest.raises(UserError, match=r"^--image-size 9: the examples are not images; leave it"):
        load(spec, label_column="label", image_size=9)


def test_without_a_test_split_a_fifth_is_held_out(tmp_path):
    small(30, 0, names=("cat", "dog", "emu", "fox")).save_to_disk(tmp_path / "a")
    dataset = load(f"hf:{tmp_path / 'a'}")  # no dictionary of splits
    assert (len(dataset.train.y), len(dataset.test.y)) == (24, 6)
    np.testing.assert_array_equal(np.bincount(dataset.test.y), [2, 2, 2])
    assert len({bytes(x) for x in (*dataset.train.x, *dataset.test.x)}) == 30
    without, held_out = dataset.notes
    assert "a fifth of the training examples is held out" in held_out
    assert without == "Classes without training examples: fox."
    assert dataset.described.startswith("train 24, held out 6 examples of 8×6×3 uint8")


def test_the_test_split_is_one_with_labels(tmp_path):
    secret = rows(noise(4, (8, 6, 3)), [-1] * 4)
    parts = {"test": secret, "validation": small(6, 1), "more": small(3, 2)}
    spec = save(tmp_path / "a", train=small(9, 0), **parts)
    assert len(load(spec).test.y) == 6
    assert len(load(spec, test_split="more").test.y) == 3
    for split, message in (
        ("x", "--test-split x: no such split; use one of train, test, v"),
        ("test", "the column label of test has the label -1"),
    ):
        with pytest.raises(UserError, match=message):
            load(spec, test_split=split)


def test_columns_are_found_or_given(tmp_path):
    one = small(9, 0, image="picture", label="kind")
    coarse = datasets.Features({"coarse": datasets.ClassLabel(names=["x", "y"])})
    two = one.add_column("coarse", [0, 1, 0] * 3, feature=coarse["coarse"])
    spec = save(tmp_path / "a", train=two, test=two)
    assert [load(spec, label_column=of).classes for of in ("kind", "coarse")] == [3, 2]
    raw = one.cast_column("picture", datasets.Image(decode=False))
    pair = one.add_column("other", raw["picture"][:], feature=datasets.Image())
    assert load(save(tmp_path / "b", train=pair), image_column="other").shape == (8, 6, 3)
    text = one.cast_column("kind", datasets.Value("string")).remove_columns("picture")
    for split, options, message in (
        (one, {"image_column": "x"}, "--image-column x: no such column; use one of pic"),
        (two, {"label_column": "x"}, "--label-column x: no such column; use one of pic"),
        (
            two,
            {"label_column": "kind", "image_column": "coarse"},
            "the column coarse of train has no",
        ),
        (
            two.select_columns("kind").add_column("x", [1.0] * 9),
            {"image_size": 8},
            "--image-size 8: the examples are not images",
        ),
        (two, {}, "several labels; give --label-column, one of kind, coarse"),
        (pair, {}, "several images; give --image-column, one of picture, other"),
        (text, {}, "no labels; give --label-column, one of kind, or put images"),
    ):
        with pytest.raises(UserError, match=message):
            load(save(tmp_path / "c", train=split), **options)


def test_without_network_or_library_the_remedy_is_named(monkeypatch, capfd):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"hf:nobody/knows: cannot be loaded .*; give a name"):
        load("hf:nobody/knows")
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'not installed; run pip install "sam_optax\[hf\]"'):
        load("hf:cifar10")


def saved(**splits):
    return lambda path: save(path, **{name: of() for name, of in splits.items()})


def numbers(n=10, **columns):
    return lambda: table(n, **columns)


def images(cell):
    return lambda: rows([*noise(3, (64, 64, 3)), cell], [0, 1, 2, 0])


def parquet(**splits):
    """Tables with a list of columns for each split, in which a name may come twice."""

    def write(path):
        path.mkdir()
        for split, columns in splits.items():
            names, values = zip(*columns, strict=True)
            found = pyarrow.table([*map(pyarrow.array, values)], names=names)
            pyarrow.parquet.write_table(found, path / f"{split}.parquet")

    return write


def folders(*names, change=lambda path: None):
    return lambda path: (tree(path, *names), change(path))


def link(path):
    tree(path.parent / "far", "emu")
    (path / "emu").symlink_to(path.parent / "far" / "emu")


def nothing(path):
    (path / "emu").symlink_to("no")


def another_format(path):
    Image.new("RGB", (4, 5)).save(path / "dog/x.png", "PCX")


def csv(path):
    path.mkdir()
    (path / "train.csv").write_text("a,label,label\n1,0,0\n2,1,1\n")


RED, TWO = "\x1b[31mred", ("cat", "dog")
REFUSED = {
    "nowhere": (lambda path: None, "there is no such folder"),
    "a file": (lambda path: path.touch(), "a file, not a folder"),
    "an empty folder": (lambda path: path.mkdir(), "cannot be loaded .*; give a name from hugg"),
    "a linked folder": (folders(*TWO, change=link), "emu is not read: datasets .* links to fold"),
    "a class of nothing": (folders(*TWO, change=nothing), "emu is not read"),
    "a class named train": (folders("train", "ship"), "ship/0.png is not read: datasets .* splits"),
    "an image in two splits": (
        folders("train/a", "train/b", "test/train", "test/b"),
        "test/train/0.png is read tw",
    ),
    "no UTF-8": (folders("\udcff/cat", "\udcff/dog"), "cannot be loaded .*encode"),
    "another format": (folders(*TWO, change=another_format), "not one of BMP, "),
    "two columns of a name": (csv, "train.csv has 2 columns of the name label; rename"),
    "no rows": (parquet(train=[("a", pyarrow.array([], "int64"))]), "has no rows"),
    "nested labels": (parquet(train=[("a", [1]), ("label", [{"b": 1}])]), "the type struct"),
    "escapes in one split": (
        parquet(train=[("label", [0])], test=[(RED, [0]), ("label", [0])]),
        r"cannot be loaded .*\?\[31mred",
    ),
    "no labels": (saved(train=numbers(label=None)), "no labels; give --label-column, one of a"),
    "no features": (
        saved(train=numbers(age=None, rooms=None, rich=None, text=["a"] * 10, lists=[[1]] * 10)),
        r"neither images nor numbers, only text \(string\), lists \(List",
    ),
    "fractions": (saved(train=numbers(label=np.arange(10) / 3)), "the type double; use integ"),
    "missing": (saved(train=numbers(label=[None] + [1] * 9)), "has 1 missing values"),
    "one class": (saved(train=numbers(label=[4] * 10)), "has only one class; use at least two"),
    "NaN": (saved(train=numbers(age=[None] + [1.0] * 9)), "the column age of train has 1 values"),
    "new class": (
        saved(train=numbers(), test=numbers(3, label=[0, 1, 7])),
        "of test has the label 7, which is not a class",
    ),
    "other classes": (
        saved(train=lambda: small(6, 0), test=lambda: small(6, 0, names=("emu", "dog", "cat"))),
        "has other classes in test: ",
    ),
    "other columns": (
        saved(train=numbers(), test=numbers(age=None)),
        "the split test lacks the column age",
    ),
    "splits": (saved(a=numbers(), b=numbers()), "no split named train, only a, b"),
    "corrupt": (
        saved(train=images({"bytes": b"no", "path": "x/5.png"})),
        r"train: image 3 \(5.png\) cannot be read .*; replace or remo",
    ),
    "no image": (saved(train=images(None)), r"train: image 3 cannot be read \(missing\)"),
    "16 bits": (
        saved(train=images(Image.fromarray(np.zeros((64, 64), np.uint16)))),
        r"image 3 cannot be read \(more than 8 bits, mode I;16\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_named_in_one_line_without_control_characters(case, tmp_path, capfd):
    make, message = REFUSED[case]
    make(tmp_path / "a")
    capfd.readouterr()
    label = ["--label-column", "label"] * (case != "no labels")
    assert main(["compare", "--dataset", f"hf:{tmp_path / 'a'}", *label]) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n"), "\x1b" in err) == ("", 1, False)
    assert re.match(f"sam_optax: --dataset hf:{tmp_path / 'a'}:? .*{message}", err)


def photographs(n):
    """Images of different sizes: a ramp from left to right, brighter each."""
    rng = np.random.default_rng(0)
    for i in range(n):
        height, width = rng.integers(20, 40, 2)
        ramp = np.linspace(10 * i, 10 * i + 100, width).astype(np.uint8)
        yield Image.fromarray(np.broadcast_to(ramp, (height, width)).copy())


@pytest.fixture
def varying(tmp_path):
    """Train and test examples of many sizes."""
    train, test = (rows(photographs(n), np.arange(n) % 3) for n in (7, 5))
    return save(tmp_path / "a", train=train, test=test)


def test_central_squares_are_resized_if_asked(varying):
    dataset = load(varying, image_size=16)
    assert (dataset.shape, dataset.train.x.dtype) == ((16, 16, 1), np.uint8)
    for image, photo in zip(dataset.test.x.astype(float), photographs(5), strict=True):
        assert abs(image.mean() - np.asarray(photo).mean()) < 6  # the middle of a ramp
        slope, side = 100 / (photo.width - 1), min(photo.size)
        rise = image[:, -1].mean() - image[:, 0].mean()
        np.testing.assert_allclose(rise, slope * side * 15 / 16, atol=6)


def test_without_a_size_images_that_differ_or_are_many_ask_for_it(varying, tmp_path, monkeypatch):
    (width, height), other = (photo.size for photo in photographs(2))
    sizes = f"differ in size, such as {width}×{height} and {other[0]}×{other[1]} pixels"
    ask = "give --image-size, such as 224, to resize"
    with pytest.raises(UserError, match=f"hf:.*: the images {sizes}; {ask}"):
        load(varying)
    monkeypatch.setattr(reading, "_UNASKED", 3 * 18 * 8 * 6 - 1)
    spec = save(tmp_path / "b", train=small(12, 0), test=small(6, 1))
    with pytest.raises(UserError, match=f"the images take 0.0 GB of memory; {ask}"):
        load(spec)
    assert load(spec, image_size=10).shape == (10, 10, 3)
