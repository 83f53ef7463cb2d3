"""The shared repository builder: cut rule, order of files, exact length, truncation (paper, Appendix B.2)."""

from __future__ import annotations

import copy

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from data_prep.lca import first_cut, repository_input, tree_distance
from data_prep.select import PrepError
from data_prep.tokens import raw_prefix


def test_the_cut_needs_fifty_lines_before_it() -> None:
    assert first_cut([7, 49], 100) is None
    assert first_cut([60, 50, 7], 100) == 50
    assert first_cut([51, 200, 99], 100) == 51
    assert first_cut([100, 200], 100) is None  # upstream indices can lie beyond the end of the file
    assert first_cut([], 100) is None


def test_tree_distance_grows_with_steps() -> None:
    names = ["pkg/a/near.py", "pkg/a/b/below.py", "pkg/up.py", "pkg/c/cousin.py", "top.py", "other/deep/x.py"]
    assert [tree_distance("pkg/a/new.py", name) for name in names] == [2, 3, 3, 4, 4, 6]
    assert tree_distance("a/x.py", "a/x.py") == 2
    assert tree_distance("a.py", "a.py/x.py") == 3  # a file name is no folder


FILES = [
    ("top.py", "top = 1\n" * 40),
    ("pkg/a/near.py", "near = 1\n" * 5),
    ("pkg/up.py", "up = 1\n" * 10),
    ("README.md", "# not python\n" * 50),
    ("logo.png", None),
    ("pkg/empty.py", ""),
    ("pkg/blank.py", " \n\n"),
    ("pkg/a/new.py", "the file itself\n" * 50),
]
TEXT = "\n".join(f"x{i} = {i}" for i in range(70))


@pytest.mark.parametrize("which", ["tokenizer", "plain_tokenizer"])
def test_any_tokenizer_gets_exactly_the_requested_length(which: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(which)
    whole = repository_input(tokenizer, "pkg/a/new.py", TEXT, 60, FILES, [10**6])
    assert whole[10**6] == "repository shorter than the input"
    lengths = list(range(500, 640, 7))
    built = repository_input(tokenizer, "pkg/a/new.py", TEXT, 60, FILES, lengths)
    for length in lengths:
        ids = built[length]
        assert not isinstance(ids, str) and len(ids) == length
        assert list(ids[: len(raw_prefix(tokenizer))]) == raw_prefix(tokenizer)
        if raw_prefix(tokenizer):
            assert ids.count(tokenizer.bos_token_id) == 1


def test_nearest_file_last_farthest_cut_from_its_start(plain_tokenizer) -> None:
    ids = repository_input(plain_tokenizer, "pkg/a/new.py", TEXT, 60, FILES, [620])[620]
    text = plain_tokenizer.decode(ids)
    prefix = "\n".join(TEXT.split("\n")[:60]) + "\n"
    order = ["# pkg/up.py\n", "up = 1\n" * 10, "# pkg/a/near.py\n", "near = 1\n" * 5, "# pkg/a/new.py\n", prefix]
    assert text.endswith("".join(order))
    assert "x60" not in text and "the file itself" not in text and "not python" not in text and "blank.py" not in text
    farthest = text[: text.index("# pkg/up.py")]
    whole = "# top.py\n" + "top = 1\n" * 40
    assert farthest and len(farthest) < len(whole) and whole.endswith(farthest)


def test_the_order_of_the_snapshot_does_not_matter(tokenizer) -> None:
    forward = repository_input(tokenizer, "pkg/a/new.py", TEXT, 60, FILES, [600])
    assert forward == repository_input(tokenizer, "pkg/a/new.py", TEXT, 60, FILES[::-1], [600])


def test_a_prefix_that_fills_the_input_is_not_eligible(tokenizer) -> None:
    assert repository_input(tokenizer, "pkg/a/new.py", TEXT, 60, FILES, [50])[50] == "prefix fills the whole input"


def test_pieces_tokenised_alone_equal_the_whole_text(tokenizer) -> None:
    """Joining per-file ids is exact because no merge crosses the newline before a header."""
    ids = repository_input(tokenizer, "pkg/a/new.py", TEXT, 60, FILES, [600])[600]
    assert tokenizer(tokenizer.decode(ids[1:]))["input_ids"] == list(ids)


def test_a_tokenizer_that_appends_an_end_token_is_refused(tokenizer) -> None:
    ending = copy.deepcopy(tokenizer)
    ending.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    with pytest.raises(PrepError, match="appends special tokens to plain text"):
        repository_input(ending, "pkg/a/new.py", TEXT, 60, FILES, [600])


def test_a_tokenizer_that_marks_word_starts_still_gives_exact_lengths() -> None:
    """SentencePiece's way: every piece encoded alone starts with a space mark, and a BOS is prepended."""
    words = Tokenizer(WordLevel({"<s>": 0, "<unk>": 1, "▁x1": 2, "▁=": 3}, unk_token="<unk>"))
    words.pre_tokenizer = Metaspace()
    words.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", unk_token="<unk>")
    for length in (200, 211, 230):
        ids = repository_input(wrapped, "pkg/a/new.py", TEXT, 60, FILES, [length])[length]
        assert len(ids) == length and ids[0] == 0 and ids.count(0) == 1
