#!/usr/bin/env python3
"""Writes crates/model/tests/fixtures/tokenizer: three small byte-level BPE vocabularies as tokenizer.json and the ids that the `tokenizers` library
gives for a list of hard strings; where it cuts a text by patterns of general kinds; with a GGUF file as argument also the ids for its vocabulary (the file itself is not committed).

Needs: pip install tokenizers gguf (PyPI). Usage: scripts/make-tokenizer-fixtures.py [SmolLM2-135M-Instruct.Q4_1.gguf]
"""
import json
import pathlib
import sys

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE

folder = pathlib.Path(__file__).resolve().parent.parent / "crates/model/tests/fixtures/tokenizer"

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Of kinds that both engines read alike (`crates/model/src/tokenizer/pattern.rs`).
PATTERNS = [
    r"\p{N}{1,3}", r"[一-龥\p{Hiragana}\p{Katakana}]+", r"\d", r"\D+", r"\s+$", r"[\r\n]", r"\s?[A-Za-zµÀ-ÖØ-öø-ƺ]+", r"\s?\p{L}+|\p{N}|[^\s\p{L}\p{N}]+",
    r"\p{Han}|\p{Hangul}+|\p{Cyrillic}+|\p{Arabic}+|\p{Thai}+", r"[\p{P}\p{S}]", r"(?:a|ab)(c|bcd)?", r"a{1,2}?b?", r"[^\p{Lu}\p{Mn}]+?\.", r"\A.|.\z", r"\x41|\t|\$|\-|\P{L}",
]
CUT_BESIDES = ["aⒶb", "a\u200db\u200cc", "aⅣb a½b", "a\u0345b", "é_9٣", "ß ẞ ſ \u212a", "abcd abbcd aab", "x.y. Z.", "a\u2028b\u0085c\x0bd\x1ce", "กขค", "שלום", "ΑΒΓ αβγ", "ǅ", "a \n b  "]
CORPUS = [
    "The abacus counts what the hand moves: every bead that goes up on one wire comes down on another.",
    "A page holds sixteen tokens. The table says which page comes next, and the books say who holds it.",
    "I'm sure they've said it'll work; we don't know whether she'd agree. IT'S FINE, DON'T WORRY.",
    "In 2024 there were 365 days and 1 more; 12345 + 67890 = 80235, 3.14159 is near pi, x² + y² = z².",
    "def attend(query, key, value):\n    scores = query @ key.T\n    return softmax(scores) @ value\n\n\n# end\n",
    "Der Rechenrahmen zählt über die Brücke, naïve façade, déjà vu, señor, Ångström, Łódź.",
    "算盘是一种计算工具。日本語のそろばん。주판. Счёты считают. حساب. गणना।",
    "🎉 🎊 👩‍👩‍👧 ✅ — “quotes” … <tags> {\"json\": [1, 2, null]}\t tabs\tand   spaces   ",
] * 3
STRINGS = [
    "", " ", "  ", "\n", "\n\n", " \n", "\n ", "a", " a", "  a", "a ", "a  ", "a   b", "   a", "\ta", "\t\ta b", "a\nb", "a\n\nb", "a \n b", "a\r\nb", "\r\n\r\n x",
    "Hello, world!", "user\nHello", "I'm, I'M, they'LL 've 'D 's'", "don't", "''s", "2024", "12345", "a1b22c333d4444", "1 2  3", "x²y³½", "٣٤", "3.14159", "-1e-7",
    "naïve façade", "Łódź zażółć", "算盘是一种计算工具。", "日本語のそろばん", "주판", "Счёты", "حساب", "गणना।", "🎉", "👩‍👩‍👧 family", "a🎉b", "e\u0301", "\u00a0x\u00a0", "\u3000x", "\u2028x",
    "\ufeffbom", "nul\u0000byte", "\u0007\u001b[0m", "\ufdd0\uffff", "\U0010ffff", "<|im_end|>", "<|im_end|>\n", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "a<|im_end|>b", "<|im_end|><|im_end|>", "<|im_end|> <|im_end|>", " <|im_start|> x", "<|im_end", "|im_end|>", "<|endoftext|>", "<<|im_end|>>", "<think>\nhm</think>\n", "<thinking>",
    "...", "!!!???", "a,b;c", "(x)[y]{z}", "http://a.b/c?d=e&f#g", "snake_case camelCase", "    indented\n        more\n", "end with newline\n", "end with spaces   ",
    "tab\tand\nnewline \n  mixed \t ", "ALL CAPS", "aaaaaaaaaaaaaaaaaaaaaaaa", "................................................", " " * 100, " " * 101 + "x", "\n" * 50, "ab" * 300,
    *CORPUS[:8],
]


def small(kind):
    tokenizer = Tokenizer(BPE(ignore_merges=kind != "smollm"))
    if kind == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex({"llama3": LLAMA3, "tekken": TEKKEN}[kind]), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=520, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    if kind != "smollm":
        tokenizer.post_processor = processors.Sequence([
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<|endoftext|> $A", pair="<|endoftext|> $A <|endoftext|> $B:1", special_tokens=[("<|endoftext|>", 0)]),
        ])
    return tokenizer


def from_gguf(path):
    from gguf import GGUFReader

    fields = GGUFReader(path).fields
    read = lambda key: fields[f"tokenizer.ggml.{key}"].contents()
    assert (read("model"), read("pre")) == ("gpt2", "smollm")
    tokens, types = read("tokens"), read("token_type")
    vocab = {token: id for id, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab, [tuple(m.split(" ")) for m in read("merges")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t, k in zip(tokens, types) if k == 3])
    return tokenizer


def expected(tokenizer, strings):
    rows = []
    for text in strings:
        tokenizer.encode_special_tokens = False
        meant = tokenizer.encode(text, add_special_tokens=False).ids
        whole = tokenizer.encode(text, add_special_tokens=True).ids
        tokenizer.encode_special_tokens = True
        plain = tokenizer.encode(text, add_special_tokens=False).ids
        row = {"text": text, "plain": plain, "decoded": tokenizer.decode(plain, skip_special_tokens=False)}
        if meant != plain:
            row["with_specials"] = meant
            row["decoded_skipping"] = tokenizer.decode(meant, skip_special_tokens=True)
        if whole != meant:
            row["add_special"] = whole
        if row["decoded"] == text:
            del row["decoded"]
        rows.append(row)
    return rows


def cuts():
    """One text, and for each pattern the lengths of its pieces in characters."""
    text = "¦".join(STRINGS + CUT_BESIDES)
    pieces = lambda pattern: [len(w) for w, _ in pre_tokenizers.Split(Regex(pattern), "isolated").pre_tokenize_str(text)]
    return [{"text": text}] + [{"pattern": p, "chars": pieces(p)} for p in PATTERNS]


def write(name, value):
    lines = ",\n".join(json.dumps(row, ensure_ascii=True) for row in value)
    (folder / name).write_text(f"[\n{lines}\n]\n")
    print(name, len(value))


def main():
    folder.mkdir(parents=True, exist_ok=True)
    for kind in ["smollm", "llama3", "tekken"]:
        tokenizer = small(kind)
        tokenizer.encode_special_tokens = False
        (folder / f"{kind}_small.json").write_text(tokenizer.to_str(pretty=False) + "\n")
        write(f"{kind}_small.expected.json", expected(tokenizer, STRINGS))
    write("cuts.expected.json", cuts())
    if len(sys.argv) > 1:
        write("smollm2.expected.json", expected(from_gguf(sys.argv[1]), STRINGS))


if __name__ == "__main__":
    main()
