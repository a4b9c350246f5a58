#!/usr/bin/env python3
"""Writes crates/model/tests/fixtures/tokenizer/spm-*: small SentencePiece vocabularies as GGUF and tokenizer.json, with the ids that the
`sentencepiece` library (for GGUF) and the `tokenizers` library (for tokenizer.json) give for a list of hard strings.

Needs: pip install sentencepiece tokenizers gguf (PyPI).
"""
import importlib.util
import io
import json
import pathlib
import re

import gguf
import sentencepiece as spm
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

HERE = pathlib.Path(__file__).resolve().parent
OUT = HERE.parent / "crates/model/tests/fixtures/tokenizer"
spec = importlib.util.spec_from_file_location("make_tokenizer_fixtures", HERE / "make-tokenizer-fixtures.py")
base = importlib.util.module_from_spec(spec)
spec.loader.exec_module(base)
# The library ends a text at a NUL.
STRINGS = [s for s in base.STRINGS if "\0" not in s] + ["<s>", "</s>x", "a</s>", "<0x41>", "\u2581", "a\u2581b", "<unk>"]
USER = ["<think>", "</think>", "\n\n"]


def train(dummy_prefix, spaces_inside):
    out = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(base.CORPUS), model_writer=out, model_type="bpe", vocab_size=720, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=dummy_prefix,
        split_by_whitespace=not spaces_inside, allow_whitespace_only_pieces=True, split_digits=True, character_coverage=1.0,
        control_symbols=["<|im_start|>", "<|im_end|>"], user_defined_symbols=[] if dummy_prefix else USER, hard_vocab_limit=False,
        minloglevel=2, num_threads=1)
    return spm.SentencePieceProcessor(model_proto=out.getvalue())


def kind(sp, i):
    if sp.is_byte(i):
        return 6
    if sp.is_unknown(i):
        return 2
    if sp.is_control(i):
        return 3
    # A vocabulary may also have learned such a piece, with a score of its own.
    return 4 if sp.id_to_piece(i) in USER and sp.get_score(i) == 0.0 else 1


def write_gguf(path, sp, dummy_prefix):
    ids = range(sp.get_piece_size())
    w = gguf.GGUFWriter(path, "llama")
    w.add_tokenizer_model("llama")
    w.add_tokenizer_pre("default")
    w.add_token_list([sp.id_to_piece(i) for i in ids])
    w.add_token_scores([sp.get_score(i) for i in ids])
    w.add_token_types([kind(sp, i) for i in ids])
    w.add_bos_token_id(sp.bos_id())
    w.add_eos_token_id(sp.eos_id())
    w.add_unk_token_id(sp.unk_id())
    w.add_add_space_prefix(dummy_prefix)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def write_expected(name, prefix, plain, meant, bos):
    """Ids of a user's text, ids with control tokens meant, the same with a begin token, and the text that decoding gives."""
    rows = []
    for text in STRINGS:
        row = {"text": text, "plain": plain(text), "with_specials": meant(text)}
        row["add_special"] = row["with_specials"] if bos is None or row["with_specials"][:1] == [bos] else [bos] + row["with_specials"]
        # The space before the text stays, and U+2581 is a space.
        row["decoded"] = (" " if prefix and text else "") + text.replace("\u2581", " ")
        rows.append(json.dumps(row, ensure_ascii=True))
    (OUT / f"{name}-expected.json").write_text("[\n" + ",\n".join(rows) + "\n]\n")


def with_controls(sp):
    """The library does not look for control tokens in text: cut there, and encode what lies between as texts of their own."""
    controls = {sp.id_to_piece(i): i for i in range(sp.get_piece_size()) if kind(sp, i) in (2, 3)}
    cut = re.compile("(" + "|".join(map(re.escape, controls)) + ")")
    return lambda text: [i for part in cut.split(text) if part for i in ([controls[part]] if part in controls else sp.encode(part))]


def write_json(name, sp, tokenizer):
    """The vocabulary as tokenizer.json, merges by score as the `transformers` converter derives them."""
    vocab = {sp.id_to_piece(i): i for i in range(sp.get_piece_size())}
    merges = []
    for piece, i in vocab.items():
        if kind(sp, i) != 1:
            continue
        splits = [(piece[:k], piece[k:]) for k in range(1, len(piece)) if piece[:k] in vocab and piece[k:] in vocab]
        merges += [(a, b, sp.get_score(i)) for a, b in sorted(splits, key=lambda p: (vocab[p[0]], vocab[p[1]]))]
    merges = [(a, b) for a, b, _ in sorted(merges, key=lambda m: m[2], reverse=True)]
    tok = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer(tok)
    tok.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tok.add_special_tokens([AddedToken(sp.id_to_piece(i), special=True, normalized=False)
                            for i in range(sp.get_piece_size()) if kind(sp, i) in (2, 3)])
    tok.add_tokens([AddedToken(t, normalized=False) for t in USER if t in vocab and kind(sp, vocab[t]) == 4])
    tok.save(str(OUT / f"{name}.json"), pretty=False)
    # Control tokens typed by a user stay text there, too, only when they are not matched.
    plain = Tokenizer.from_file(str(OUT / f"{name}.json"))
    plain.encode_special_tokens = True
    return lambda text: plain.encode(text, add_special_tokens=False).ids, lambda text: tok.encode(text, add_special_tokens=False).ids


def gemma_like(tok):
    tok.normalizer = normalizers.Replace(" ", "\u2581")
    tok.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")


def llama_like(tok):
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])


def main():
    for name, dummy_prefix, spaces_inside, style in [
        ("spm-plain", False, False, gemma_like), ("spm-prefix", True, False, llama_like), ("spm-phrases", False, True, None),
    ]:
        sp = train(dummy_prefix, spaces_inside)
        write_gguf(OUT / f"{name}.gguf", sp, dummy_prefix)
        write_expected(name, dummy_prefix, sp.encode, with_controls(sp), sp.bos_id())
        if style:
            write_expected(f"{name}-json", dummy_prefix, *write_json(name, sp, style), None)


if __name__ == "__main__":
    main()
