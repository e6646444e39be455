"""Encoding with fastokens gives the tokens of tokenizers, however the text is cut into chunks."""

from __future__ import annotations

import json
import random
import sys
from functools import cache
from itertools import pairwise, product
from types import ModuleType

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from pentad.workers.data import encoder as encoder_module
from pentad.workers.data.encoder import Encoder, TextChunk
from pentad.workers.text import word_boundaries
from pentad.workers.text.digit_cuts import cut_at_digits, without_digits_step

# Every kind of byte, and every symbol that an expression treats specially.
LETTERS = (
    "ab\u00e9\u5c71\u3042\u0416\u01c5\u017f\u180e'tTlLsS12\u00b2\u0661_-./(,;\u3002\u201d\U0001f3d4\ue000\u200b"
    " \n\r\t\u00a0\u3000\u2003\u0085\u0301\x1c\x00"
)
DEEPSEEK = [  # its file contains the line ends themselves
    r"\p{N}{1,3}",
    word_boundaries._KANA_AND_HANZI,
    word_boundaries._WITHOUT_DIGITS.replace(r"\r", "\r").replace(r"\n", "\n"),
]
EXPRESSIONS: dict[str, list[str]] = {
    "GPT-2": [],
    "DeepSeek": DEEPSEEK,
    **{str(number): [expression] for number, expression in enumerate(sorted(word_boundaries._EXPRESSIONS))},
}
TEXTS = st.text(st.sampled_from(LETTERS), max_size=40)


@cache
def tokenizer_of(name: str, kind: str = "") -> Tokenizer:
    """A BPE that merges whatever the expression lets it merge: it is trained on noise of the same characters."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not EXPRESSIONS[name])
    steps = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in EXPRESSIONS[name]]
    further = [pre_tokenizers.Digits(individual_digits=True)] if "digits" in kind else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*further, *steps, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    if "NFC" in kind:
        tokenizer.normalizer = normalizers.NFC()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    noise = random.Random(name)
    texts = ["".join(noise.choices(LETTERS, k=60)) for _ in range(400)]
    trainer = trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=alphabet, special_tokens=["<e>"], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    if "added" in kind:
        tokenizer.add_tokens([AddedToken("s12", normalized=False), AddedToken("t'l"), AddedToken("b\u0301")])
    content = json.loads(tokenizer.to_str())
    model = content["model"]
    if kind == "other ids":  # as in RoBERTa, not in the order of the merges
        numbers = random.Random(0).sample(range(len(model["vocab"])), len(model["vocab"]))
        model["vocab"], content["added_tokens"] = dict(zip(model["vocab"], numbers, strict=True)), []
    if kind == "bytes without tokens":  # 0x00, 0x1c and 0xc7
        gone = set("\u0100\u011c\u00c7")
        kept = sorted((number, token) for token, number in model["vocab"].items() if not gone & set(token))
        model["vocab"] = {token: number for number, (_, token) in enumerate(kept)}
        model["merges"] = [pair for pair in model["merges"] if not gone & set("".join(pair))]
    if kind == "ignore_merges":  # some of which can no longer be merged
        model |= {"ignore_merges": True, "merges": model["merges"][::2]}
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.encode_special_tokens = True
    return tokenizer


def reference(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "") for name in EXPRESSIONS),
        ("GPT-2", "digits"),
        ("GPT-2", "digits, added"),
        ("GPT-2", "digits, NFC"),
        ("1", "NFC"),
        ("DeepSeek", "added"),
        ("2", "NFC, added"),
        ("2", "ignore_merges"),
        ("1", "other ids"),
        ("GPT-2", "bytes without tokens"),
    ],
)
def test_tokens_are_those_of_tokenizers(name: str, kind: str) -> None:
    tokenizer = tokenizer_of(name, kind)
    encoder = Encoder(tokenizer, 0)
    assert encoder.fast is not None and encoder.fast.cuts_at_digits == (kind == "digits")

    @given(st.lists(TEXTS, max_size=4))
    @example(["12  3\u00a0\u00b2", "\u00a0 1", "", "\u0661\u0661 \u00b2\t\n 12"])
    @example(["\u00a0  a", "1\u00b2\u0661", "b\u0301 1\u0301"])
    @example(["don't say 12.5\n  or s12 t'l<e> \u5c71.\n/a"])
    @example(["a\n\nTs", " \n t  S", "\n\n", "((ab /(a\n/(b", "  ", "aTtls"])
    def check(texts: list[str]) -> None:
        assert [ids.tolist() for ids in encoder.encode(texts)] == [reference(tokenizer, text) for text in texts]

    check()


def test_pieces_cut_at_digits_have_the_tokens_of_a_tokenizer_that_splits_digits_off() -> None:
    tokenizer = tokenizer_of("GPT-2", "digits")
    content = json.loads(tokenizer.to_str())
    step = without_digits_step(content)
    assert step is not None and without_digits_step({**content, "normalizer": {"type": "NFC"}}) is None
    plain = Tokenizer.from_str(json.dumps({**content, "pre_tokenizer": step}))
    plain.encode_special_tokens = True

    @given(st.lists(TEXTS, max_size=4))
    @example(["12  3\u00a0\u00b2", "\u00a0 1", "", "\u0661\u0661 \u00b2\t\n 12"])
    @example(["a  1 22   3", "", "4"])
    def check(texts: list[str]) -> None:
        pieces, firsts = cut_at_digits(texts)
        found = [pieces[start:stop] for start, stop in pairwise(firsts)]
        assert ["".join(each) for each in found] == texts
        for text, its in zip(texts, found, strict=True):
            assert [token for piece in its for token in reference(plain, piece)] == reference(tokenizer, text)

    check()


# Contexts that distinguish letters, digits, marks, symbols, spaces and cases, and the order that NFC gives marks.
CONTEXTS = (
    *("a{}a", "1{}1", " {} ", ".{}.", "'{}'", "\n{}\n", "A{}A", "a{}A", "A{}a", "{0}{0}", "a'{}a", "s{} s", "\r{}/"),
    *(
        "a {}a",
        "  {}  ",
        "\u00e9{}\u00e9",
        "\u5c71{}\u5c71",
        "a\u0315{}\u0327a",
        "{}\u0301",
        "\u0301{}",
        "1 {}1",
        "/{}\n",
    ),
)


def tokenizer_of_pairs(name: str, kind: str) -> Tokenizer:
    """A BPE that merges the bytes on both sides of every border of a context, so that each split shows."""
    letters = encoder_module._alphabet()
    near, first, further = sorted(set("".join(CONTEXTS).encode())), range(0xC2, 0xF5), range(0x80, 0xC0)
    pairs = [*product(near, [*near, *first]), *product(further, [*near, *first])]
    merges = [(letters[left], letters[right]) for left, right in dict.fromkeys(pairs)]
    if kind == "digits":  # as if trained with this step: no merge crosses the border of a digit
        merges = [pair for pair in merges if not {*"01"} & {*pair}]
    tokens = [*letters, *dict.fromkeys(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    like = tokenizer_of(name, kind)
    tokenizer.pre_tokenizer = like.pre_tokenizer
    if like.normalizer:
        tokenizer.normalizer = like.normalizer
    return tokenizer


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "kind"), [*((name, "") for name in EXPRESSIONS), ("GPT-2", "digits"), ("2", "NFC")])
def test_every_character_is_of_the_same_kind(name: str, kind: str) -> None:
    tokenizer = tokenizer_of_pairs(name, kind)
    encoder = Encoder(tokenizer, 0)
    assert encoder.fast is not None and encoder.fast.cuts_at_digits == (kind == "digits")
    codes = [*range(0x80, 0xD800), *range(0xF900, 0x20000), *range(0x31340, 0x33480)]  # planes 0 and 1, newest letters
    characters = list(map(chr, codes))
    for start in range(0, len(characters), 4096):
        some = characters[start : start + 4096]
        texts = ["\0".join(context.format(each) for context in CONTEXTS) for each in some]
        expected = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        found = [ids.tolist() for ids in encoder.encode(texts)]
        assert not [each for each, ids, other in zip(some, found, expected, strict=True) if ids != other]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_chunks_do_not_change_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_module, "_AT_ONCE", 7)
    tokenizer = tokenizer_of(name)
    encoder = Encoder(tokenizer, 0)

    @given(st.lists(st.tuples(TEXTS.filter(bool), st.integers(1, 9)), max_size=4))
    def check(documents: list[tuple[str, int]]) -> None:
        chunks = [
            TextChunk(text[start : start + size], start + size >= len(text))
            for text, size in documents
            for start in range(0, len(text), size)
        ]
        found = [document.tokens.tolist() for document in encoder.documents(chunks)]
        assert found == [[*reference(tokenizer, text), 0] for text, _ in documents]

    check()


def test_a_long_document_is_cut_into_groups_and_not_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_module, "_AT_ONCE", 100)
    encoder = Encoder(tokenizer_of("GPT-2"), 0)
    groups = list(encoder._groups(TextChunk("some words " * 3, number == 99) for number in range(100)))
    assert len(groups) > 20 and max(len(chunk.text) for group in groups for chunk in group) < 150
    assert "".join(chunk.text for group in groups for chunk in group) == "some words " * 300
    assert [chunk.last for group in groups for chunk in group] == [False] * (len(groups) - 1) + [True]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("dropout", "its model has dropout 0.5"),
        ("prefix", "its pre-tokenizer is not one of those in docs/data-build.md"),
        ("unknown expression", "its pre-tokenizer is not one of those in docs/data-build.md"),
        ("digits left", "its pre-tokenizer is not one of those in docs/data-build.md"),
        ("no expression", "its pre-tokenizer is not one of those in docs/data-build.md"),
        ("lowercase", "its normalizer is Lowercase, not NFC"),
        ("space added", "its token 'a b' has spaces inside"),
        ("stripping", "its token 'ab' takes in spaces or needs word borders beside it"),
    ],
)
def test_a_tokenizer_that_is_not_known_encodes_whole_documents(name: str, reason: str) -> None:
    tokenizer = Tokenizer.from_str(tokenizer_of("GPT-2").to_str())
    if name == "dropout":
        tokenizer.model.dropout = 0.5
    elif name == "prefix":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif name == "unknown expression":
        split = pre_tokenizers.Split(Regex(r"\w+ \w+"), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    elif name == "digits left":
        split = pre_tokenizers.Split(Regex(word_boundaries._WITHOUT_DIGITS), "isolated")
        tokenizer.pre_tokenizer = split
    elif name == "no expression":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    elif name == "lowercase":
        tokenizer.normalizer = normalizers.Lowercase()
    elif name == "stripping":
        tokenizer.add_tokens([AddedToken("ab", lstrip=True)])
    else:
        tokenizer.add_tokens(["a b"])
    notes: list[str] = []
    assert Encoder(tokenizer, 0, notes.append).fast is None
    assert notes == [f"`tokenizers` encodes the text, 15 to 200 times slower: {reason}"]
    if name != "dropout":
        chunks = [TextChunk("a b's ", False), TextChunk("12 l.", True), TextChunk("T", True)]
        found = [document.tokens.tolist() for document in Encoder(tokenizer, 0).documents(chunks)]
        assert found == [[*reference(tokenizer, text), 0] for text in ("a b's 12 l.", "T")]


def test_without_fastokens_the_tokens_are_the_same_and_a_note_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    notes: list[str] = []
    encoder = Encoder(tokenizer_of("GPT-2"), 0, notes.append)
    assert encoder.fast is None
    assert encoder.encode(["aTt's 12\n"])[0].tolist() == reference(tokenizer_of("GPT-2"), "aTt's 12\n")
    (note,) = notes
    assert note.startswith("`tokenizers` encodes the text, 15 to 200 times slower: fastokens cannot be imported (")


def test_a_fastokens_with_other_tokens_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_module._Fast, "encode", lambda *_: [np.array([7])] * len(encoder_module._SAMPLES))
    notes: list[str] = []
    assert Encoder(tokenizer_of("GPT-2"), 0, notes.append).fast is None
    assert [note.rpartition(": ")[2] for note in notes] == ["fastokens has other tokens for the samples"]


def test_fastokens_is_used_without_a_word() -> None:
    notes: list[str] = []
    assert Encoder(tokenizer_of("GPT-2"), 0, notes.append).fast and not notes


class Panic(BaseException):
    """What pyo3 makes of a Rust panic: not an Exception."""


def failing(error: BaseException, where: str) -> ModuleType:
    """A fastokens that raises when it is created, for its first texts, or for a text with a `!`."""
    import fastokens

    class Failing:
        def __init__(self, content: str) -> None:
            self.inner = fastokens.Tokenizer.from_json_str(content)

        @classmethod
        def from_json_str(cls, content: str) -> Failing:
            if where == "made":
                raise error
            return cls(content)

        def encode_batch_flat(self, texts: list[str], **options: bool) -> tuple[bytes, bytes]:
            if where == "first texts" or any("!" in text for text in texts):
                raise error
            ids, offsets = self.inner.encode_batch_flat(texts, **options)
            return ids, offsets

    module = ModuleType("fastokens")
    module.__dict__["Tokenizer"] = Failing
    return module


@pytest.mark.sampled(7)
@pytest.mark.parametrize("where", ["made", "first texts", "some text"])
@pytest.mark.parametrize("error", [ValueError("no"), RuntimeError("no\nreason"), Panic("index"), TypeError("split_")])
def test_a_fastokens_that_raises_changes_no_token_and_is_named(
    monkeypatch: pytest.MonkeyPatch, where: str, error: BaseException
) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", failing(error, where))
    notes: list[str] = []
    encoder = Encoder(tokenizer_of("GPT-2"), 0, notes.append)
    for texts in (["a 12"], ["It's! 12", "", "b"], ["! \n", "t'l"], ["s12 b"]):
        assert [ids.tolist() for ids in encoder.encode(texts)] == [reference(encoder.tokenizer, text) for text in texts]
    (note,) = notes
    assert f"fastokens has failed ({type(error).__name__}: {' '.join(str(error).split())})" in note
    assert ("some text" in note) == (where == "some text") == (encoder.fast is not None)


def test_an_interrupt_inside_of_fastokens_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", failing(KeyboardInterrupt(), "some text"))
    encoder = Encoder(tokenizer_of("GPT-2"), 0)
    with pytest.raises(KeyboardInterrupt):
        encoder.encode(["!"])
