"""``notebooks/text.py``: a transformer on bytes, by ``compare`` from Python."""

from pathlib import Path

import pytest

from sam_optax.experiments import named

SCRIPT = Path(__file__).parents[2] / "notebooks" / "text.py"
find = lambda name: named.find(f"{SCRIPT}:{name}")
pytestmark = pytest.mark.slow


def test_only_the_target_of_a_pair_is_labelled(capsys):
    x, y = find("pairs")("ab\tcd\nlonger\ttext\n", 6)
    assert x.tolist() == [[97, 98, 0xFE, 99, 100, 0xFF]]
    assert y.tolist() == [[-1, -1, 99, 100, 0xFF, -1]]
    assert "1 pairs of more than 6 bytes" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="line 1 has 1 columns"):
        find("pairs")("ab", 6)


def test_it_trains_on_a_text_and_on_pairs(tmp_path, capsys):
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{n}\t{n + 1}\n" for n in range(120)))
    main = find("main")
    script = main.__globals__
    cut = script["text"]
    script["text"] = lambda content, length: cut(content[:2000], length)  # it is a large one
    for given in (script["Options"](length=16), script["Options"](path=path, length=12)):
        given.epochs, given.seeds, given.methods = 1, 1, ("sgd", "sam")
        assert list(main(given).params) == ["sgd", "sam"]
    assert "BLEU:" in capsys.readouterr().out
