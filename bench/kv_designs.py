#!/usr/bin/env python3
"""What designs of stored keys and values would lose on SmolLM2-135M-Instruct, before one of them is built.

    scripts/fetch-smollm2; scripts/fetch-texts        # model, and the text that second moments are taken from
    pip install torch transformers gguf accelerate
    python3 bench/kv_designs.py [--tokens 768] [--only PART-OF-A-NAME]

Reads one text once for each design with a model whose attention sees keys and values as the design would give them back (f32, errors of one
layer go through the next) and prints the mean and largest divergence of the next-token distributions from those over bf16 rows, every 16th
token, and the capacity against bf16 at 7,900 tokens, scales and 16-bit copies counted. No time is measured; pages are not simulated.

Rows, then: `rot` Hadamard; `mean` a constant key a head taken off first (scores of a query all move by the same number); `zero` a bf16 zero point;
`chan` a scale for each channel of 16 tokens, not for each token; `feed` the error of a column is taken back in the columns after it, weighed by second
moments: of queries (from another text) for keys, of the output projection's columns for values. `S`, `R`: the first S tokens and the R before
a query are read in 16 bits from copies beside the codes.
"""

import argparse
import math
import pathlib

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

ROOT = pathlib.Path(__file__).resolve().parent.parent
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXTS = ("docs/attention-features.md", "docs/attn-cpu-notes.md", "LICENSE-APACHE")
MAX = {"int8": 127.0, "fp8": 448.0, "int4": 7.0}
BITS = {"int8": 8, "fp8": 8, "int4": 4}
PAGE, LENGTH, EVERY, BLOCK = 16, 7900, 16, 128


def hadamard(n):
    h = torch.ones(1, 1)
    while h.shape[0] < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h / math.sqrt(n)


def up(x):
    """To bf16, away from zero: no element is past the range."""
    return ((x.contiguous().view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)


class Side:
    """How keys, or values, are stored."""

    def __init__(self, dtype, rot=True, mean=False, zero=False, chan=False, feed=False):
        self.dtype, self.rot, self.mean, self.zero, self.chan, self.feed = dtype, rot, mean, zero, chan, feed

    def row_bytes(self, width):
        scales = 2 * width / PAGE if self.chan else 2 + 2 * self.zero
        return width * BITS[self.dtype] / 8 + scales

    def code(self, x):
        if self.dtype == "fp8":
            return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()
        low = 0 if self.zero else -8 if self.dtype == "int4" else -127
        return x.round().clamp(low, 15 if self.zero else MAX[self.dtype])

    def steps(self, x):
        """Scale and zero point of each element."""
        if self.chan:
            pages = x.split(PAGE, 2)
            top = torch.cat([p.abs().amax(2, keepdim=True).expand_as(p) for p in pages], 2)
            return up((top / MAX[self.dtype]).clamp_min(1e-30)), 0.0
        if self.zero:
            low = -up(-x.amin(-1, keepdim=True))
            return up(((x.amax(-1, keepdim=True) - low) / 15).clamp_min(1e-30)).expand_as(x), low.expand_as(x)
        return up((x.abs().amax(-1, keepdim=True) / MAX[self.dtype]).clamp_min(1e-30)).expand_as(x), 0.0

    def read_back(self, x, mean, moments):
        turn = hadamard(x.shape[-1]) if self.rot else torch.eye(x.shape[-1])
        off = mean if self.mean else 0.0
        x = (x - off) @ turn
        s, low = self.steps(x)
        if self.feed:
            y = self.fed_back(x, s, low, turn @ moments @ turn)
        else:
            y = self.code((x - low) / s) * s + low
        return y @ turn + off

    def fed_back(self, x, s, low, moments):
        """Column by column; `moments` `[heads, width, width]` (the order and update of GPTQ, arXiv 2210.17323)."""
        width = x.shape[-1]
        damp = 0.01 * moments.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * torch.eye(width)
        u = torch.linalg.cholesky(torch.linalg.inv(moments + damp), upper=True)
        x, y = x.clone(), torch.empty_like(x)
        zero = low if torch.is_tensor(low) else torch.zeros_like(x)
        for i in range(width):
            y[..., i] = self.code((x[..., i] - zero[..., i]) / s[..., i]) * s[..., i] + zero[..., i]
            error = (x[..., i] - y[..., i]) / u[None, :, i, i, None]
            x[..., i + 1 :] -= error.unsqueeze(-1) * u[None, :, None, i, i + 1 :]
        return y


class Sim:
    """The attention that transformers calls."""

    def __init__(self):
        self.k = self.v = None
        self.sinks = self.recent = 0
        self.collect = self.bf16 = False
        self.moments, self.means, self.out_moments = {}, {}, {}

    def __call__(self, module, q, k, v, mask, scaling=None, dropout=0.0, **_):
        layer, n, group = module.layer_idx, q.shape[2], q.shape[1] // k.shape[1]
        if self.collect:
            rows = q.reshape(k.shape[1], group * n, -1)
            self.moments[layer] = rows.transpose(1, 2) @ rows / rows.shape[1]
            self.means[layer] = k.mean(2, keepdim=True)
        if self.bf16:
            k, v = k.bfloat16().float(), v.bfloat16().float()
        far_k = self.k.read_back(k, self.means[layer], self.moments[layer]) if self.k else k
        far_v = self.v.read_back(v, 0.0, self.out_moments[layer]) if self.v else v
        far_k[:, :, : self.sinks] = k[:, :, : self.sinks]
        far_v[:, :, : self.sinks] = v[:, :, : self.sinks]
        o = torch.empty_like(q)
        for at in range(0, n, BLOCK):
            for head in range(q.shape[1]):
                rows = [x[0, head // group] for x in (k, v, far_k, far_v)]
                o[0, head, at : at + BLOCK] = self.block(q[0, head, at : at + BLOCK] * scaling, *rows, at)
        return o.transpose(1, 2).contiguous(), None

    def block(self, q, k, v, far_k, far_v, at):
        """Queries `at` and on of one head: recent tokens are those of a strip before and among them."""
        end, first = at + q.shape[0], max(0, at - self.recent + 1)
        i, j = torch.arange(at, end)[:, None], torch.arange(first, end)[None]
        s = q @ far_k[:end].T
        strip = s[:, first:]
        near = j > i - self.recent
        if self.recent:
            strip.copy_(torch.where(near, q @ k[first:end].T, strip))
        strip.masked_fill_(j > i, -math.inf)
        p = s.softmax(-1)
        o = p @ far_v[:end]
        return o + (p[:, first:] * near) @ (v - far_v)[first:end] if self.recent else o


def designs():
    k, v = Side, Side
    int4 = lambda **how: Side("int4", **how)
    yield "fp8 K V, S16 R64", k("fp8"), v("fp8"), 16, 64
    yield "int4 K mean V, S16 R192", int4(mean=True), int4(), 16, 192
    yield "fp8 K V, R64", k("fp8"), v("fp8"), 0, 64
    yield "int4 K V, S16 R192", int4(), int4(), 16, 192
    yield "fp8 K feed, V", k("fp8", feed=True), v("fp8"), 0, 0
    yield "fp8 K feed, V, S16 R64", k("fp8", feed=True), v("fp8"), 16, 64
    yield "int4 K mean zero feed, V zero feed, S16 R80", int4(mean=True, zero=True, feed=True), int4(zero=True, feed=True), 16, 80
    yield "int4 K mean feed, V feed, S16 R192", int4(mean=True, feed=True), int4(feed=True), 16, 192
    yield "int4 K mean zero feed, V zero feed", int4(mean=True, zero=True, feed=True), int4(zero=True, feed=True), 0, 0
    yield "int4 K chan (not rot), V", int4(rot=False, chan=True), int4(), 0, 0
    yield "fp8 K V", k("fp8"), v("fp8"), 0, 0
    yield "int4 K V", int4(), int4(), 0, 0
    yield "int8 K V", k("int8"), v("int8"), 0, 0
    yield "int4 K zero, V zero", int4(zero=True), int4(zero=True), 0, 0


def load(sim):
    folder = ROOT / ".cache/models"
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32).eval()
    AttentionInterface.register("kv_designs", sim)
    model.set_attn_implementation("kv_designs")
    heads = model.config.num_key_value_heads
    for layer, block in enumerate(model.model.layers):
        columns = block.self_attn.o_proj.weight.detach()
        columns = columns.reshape(columns.shape[0], heads, -1, model.config.head_dim).permute(1, 2, 0, 3)
        sim.out_moments[layer] = (columns.transpose(2, 3) @ columns).sum(1)
    return tokenizer, model


def main():
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("--tokens", type=int, default=LENGTH)
    args.add_argument("--only", default="", help="designs whose name holds this")
    args.add_argument("--threads", type=int, default=2)
    args = args.parse_args()
    torch.set_num_threads(args.threads)
    sim = Sim()
    tokenizer, model = load(sim)
    ids = lambda text: tokenizer(text, return_tensors="pt").input_ids
    text = ids("".join((ROOT / t).read_text() for t in TEXTS))[:, : args.tokens]
    other = ids((ROOT / ".cache/texts/shakespeare.txt").read_text()[:8000])[:, :768]

    @torch.no_grad()
    def read(tokens):
        hidden = model.model(tokens, use_cache=False).last_hidden_state[0]
        return model.lm_head(hidden[EVERY - 1 :: EVERY]).log_softmax(-1)

    sim.collect = True
    read(other)
    sim.collect, sim.bf16 = False, True
    base = read(text)
    sim.bf16 = False
    width = model.config.head_dim
    print("| design | capacity | mean KL | largest KL |\n|---|---|---|---|")
    for name, sim.k, sim.v, sim.sinks, sim.recent in designs():
        if args.only not in name:
            continue
        got = read(text)
        kl = (base.exp() * (base - got)).sum(-1)
        copies = (sim.sinks + sim.recent) * 4 * width / LENGTH
        capacity = 4 * width / (sim.k.row_bytes(width) + sim.v.row_bytes(width) + copies)
        print(f"| {name} | {capacity:.2f} | {kl.mean():.1e} | {kl.max():.1e} |", flush=True)


if __name__ == "__main__":
    main()
