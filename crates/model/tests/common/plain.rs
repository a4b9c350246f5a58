//! A transformer written as its equations, token by token, without cache, tiles or threads, in f64 or f32.
//!
//! In f64 it is the oracle; in f32 it shows what rounding alone does, which sets the tolerance.

use half::bf16;
use suanpan_base::{HeadShape, Mask, SeqLen};
use suanpan_model::family::Experts;
use suanpan_model::{Gated, LayerWeights, Linear, Mlp, Model, Values, rope};
use suanpan_ops::{Activation, RopeStyle};

/// The arithmetic that both precisions need.
pub trait Real:
    Copy + PartialOrd + std::ops::Add<Output = Self> + std::ops::Mul<Output = Self> + std::ops::Div<Output = Self>
{
    fn of(x: f64) -> Self;
    fn to(self) -> f64;
}

impl Real for f64 {
    fn of(x: f64) -> f64 {
        x
    }
    fn to(self) -> f64 {
        self
    }
}

impl Real for f32 {
    fn of(x: f64) -> f32 {
        x as f32
    }
    fn to(self) -> f64 {
        f64::from(self)
    }
}

/// What of the run differs from a prompt at position 0 in full precision.
#[derive(Clone, Copy, Default)]
pub struct Setting {
    /// Position of the first token.
    pub start: usize,
    /// The longest sequence, by which some rotary scalings choose.
    pub length: usize,
    /// All-zero keys and values that stand before the first token in every layer.
    pub zero_keys: usize,
    /// Keys and values are rounded to bf16, as a bf16 cache does.
    pub bf16_kv: bool,
}

fn matvec<R: Real>(l: &Linear, x: &[R]) -> Vec<R> {
    let (w, cols) = (l.weight.to_f32(), x.len());
    let bias = |i: usize| R::of(l.bias.as_ref().map_or(0.0, |b| f64::from(b[i])));
    w.chunks_exact(cols)
        .enumerate()
        .map(|(i, row)| {
            row.iter().zip(x).fold(R::of(0.0), |s, (&w, &x)| s + R::of(f64::from(w)) * x) + bias(i)
        })
        .collect()
}

fn norm<R: Real>(x: &[R], w: &[f32], eps: f32) -> Vec<R> {
    let sum = x.iter().fold(R::of(0.0), |s, &v| s + v * v);
    let mean = sum / R::of(x.len() as f64) + R::of(f64::from(eps));
    let inv = R::of(1.0 / mean.to().sqrt());
    x.iter().zip(w).map(|(&x, &w)| x * inv * R::of(f64::from(w))).collect()
}

fn rotate<R: Real>(x: &mut [R], head_dim: usize, position: usize, table: &(Vec<f64>, R), style: RopeStyle) {
    let (freq, factor) = table;
    for head in x.chunks_exact_mut(head_dim) {
        for (i, f) in freq.iter().enumerate() {
            let (a, b) = match style {
                RopeStyle::Half => (i, i + freq.len()),
                RopeStyle::Interleaved => (2 * i, 2 * i + 1),
            };
            let (sin, cos) = (position as f64 * f).sin_cos();
            let (sin, cos, minus) = (*factor * R::of(sin), *factor * R::of(cos), *factor * R::of(-sin));
            (head[a], head[b]) = (head[a] * cos + head[b] * minus, head[a] * sin + head[b] * cos);
        }
    }
}

/// Queries, keys and values of one token, and their heads. Latent attention is written out: a key and a value for every head.
fn qkv<R: Real>(
    model: &Model,
    layer: &LayerWeights,
    h: &[R],
    position: usize,
    table: Option<&(Vec<f64>, R)>,
    store: impl Fn(Vec<R>) -> Vec<R>,
) -> [Vec<R>; 3] {
    let (c, dim) = (&model.config, model.config.heads.head_dim_qk);
    let turn = |x: &mut [R], dim: usize| {
        if let Some(table) = table {
            rotate(x, dim, position, table, c.rope_style);
        }
    };
    let latent = match &layer.v {
        Values::InKeys(latent) => latent,
        Values::Own(v) => {
            let (mut q, mut k) = (matvec(&layer.q, h), matvec(&layer.k, h));
            if let Some([q_norm, k_norm]) = &layer.qk_norms {
                let heads =
                    |x: &[R], w: &[f32]| x.chunks(w.len()).flat_map(|h| norm(h, w, c.rms_norm_eps)).collect();
                (q, k) = (heads(&q, q_norm), heads(&k, k_norm));
            }
            turn(&mut q, dim);
            turn(&mut k, dim);
            return [q, store(k), store(matvec(v, h))];
        }
    };
    let nope = c.latent.unwrap().nope_dim;
    let lower = latent.q_down.as_ref().map(|(down, w)| norm(&matvec(down, h), w, c.rms_norm_eps));
    let mut q = matvec(&layer.q, lower.as_deref().unwrap_or(h));
    for head in q.chunks_exact_mut(nope + c.rotary_dim) {
        turn(&mut head[nope..], c.rotary_dim);
    }
    let z = store(norm(&matvec(&layer.k, h), &latent.norm, c.rms_norm_eps));
    let mut rotated = matvec(&latent.k_rope, h);
    turn(&mut rotated, c.rotary_dim);
    let rotated = store(rotated);
    let key = |up: &Linear| {
        // The file's product of a key is the transpose.
        let w = up.weight.to_f32();
        let of = |n: usize| {
            z.iter().enumerate().fold(R::of(0.0), |s, (r, &z)| s + R::of(f64::from(w[r * nope + n])) * z)
        };
        (0..nope).map(of).chain(rotated.iter().copied()).collect::<Vec<R>>()
    };
    let k = latent.q_up.iter().flat_map(key).collect();
    [q, k, latent.v_up.iter().flat_map(|up| matvec(up, &z)).collect()]
}

/// Heads as the equations have them: those of latent attention are not absorbed.
fn plain_heads(model: &Model) -> HeadShape {
    let c = &model.config;
    let n = c.heads.num_q_heads;
    c.latent.map_or(c.heads, |l| HeadShape::with_widths(n, n, l.nope_dim + c.rotary_dim, l.v_dim))
}

fn attend<R: Real>(
    model: &Model,
    sinks: Option<&[f32]>,
    mask: Mask,
    q: &[Vec<R>],
    k: &[Vec<R>],
    v: &[Vec<R>],
) -> Vec<Vec<R>> {
    let heads = plain_heads(model);
    let (dq, dv) = (heads.head_dim_qk, heads.head_dim_v);
    let scale = R::of(f64::from(model.config.softmax_scale.unwrap_or(heads.default_scale())));
    let len = SeqLen::new(q.len(), k.len());
    let row = |i: usize, h: usize| {
        let g = h / heads.group_size();
        let seen = mask.visible(len, i);
        let scores: Vec<R> = seen
            .keys()
            .map(|p| {
                let pairs = q[i][h * dq..][..dq].iter().zip(&k[p][g * dq..][..dq]);
                let score = scale * pairs.fold(R::of(0.0), |s, (&a, &b)| s + a * b);
                model.config.attn_softcap.map_or(score, |cap| softcap(score, cap))
            })
            .collect();
        let sink = sinks.map_or(f64::NEG_INFINITY, |s| f64::from(s[h]));
        let max = scores.iter().map(|s| s.to()).fold(sink, f64::max);
        let weights: Vec<R> = scores.iter().map(|s| R::of((s.to() - max).exp())).collect();
        let sum = weights.iter().fold(R::of((sink - max).exp()), |s, &w| s + w);
        (0..dv)
            .map(|d| seen.keys().zip(&weights).fold(R::of(0.0), |s, (p, &w)| s + w * v[p][g * dv + d]) / sum)
            .collect::<Vec<R>>()
    };
    (0..q.len()).map(|i| (0..heads.num_q_heads).flat_map(|h| row(i, h)).collect()).collect()
}

fn softcap<R: Real>(x: R, cap: f32) -> R {
    let cap = f64::from(cap);
    R::of(cap * (x.to() / cap).tanh())
}

fn add<R: Real>(x: &mut [R], y: &[R]) {
    for (x, &y) in x.iter_mut().zip(y) {
        *x = *x + y;
    }
}

fn gated<R: Real>(activation: Activation, mlp: &Gated, h: &[R]) -> Vec<R> {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let one = |(&g, &u): (&R, &R)| match activation {
        Activation::Silu => g * R::of(sigmoid(g.to())) * u,
        Activation::GeluTanh => {
            let z = 2.0 * (2.0 / std::f64::consts::PI).sqrt() * (g.to() + 0.044715 * g.to().powi(3));
            g * R::of(sigmoid(z)) * u
        }
        Activation::ClampedSwiglu { alpha, limit } => {
            let limit = f64::from(limit);
            let (g, u) = (g.to().min(limit), u.to().clamp(-limit, limit));
            R::of(g * sigmoid(f64::from(alpha) * g)) * (R::of(u) + R::of(1.0))
        }
    };
    let (gate, up) = (matvec(&mlp.gate, h), matvec(&mlp.up, h));
    matvec(&mlp.down, &gate.iter().zip(&up).map(one).collect::<Vec<_>>())
}

fn mlp<R: Real>(model: &Model, mlp: &Mlp, h: &[R]) -> Vec<R> {
    let activation = model.config.family.activation;
    let (router, experts, shared) = match mlp {
        Mlp::Dense(one) => return gated(activation, one, h),
        Mlp::Experts { router, experts, shared } => (router, experts, shared),
    };
    let logits: Vec<f64> = matvec(router, h).into_iter().map(Real::to).collect();
    let mut order: Vec<usize> = (0..experts.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    let facts = model.config.experts.unwrap();
    let over = if model.config.family.experts == Experts::OverAll { experts.len() } else { facts.per_token };
    let sum: f64 = order[..over].iter().map(|&e| logits[e].exp()).sum();
    order.truncate(facts.per_token);
    let none = || vec![R::of(0.0); model.config.hidden_size];
    let mut out = shared.as_ref().map_or_else(none, |one| gated(activation, one, h));
    for e in order {
        let weight = R::of(f64::from(facts.scale) * logits[e].exp() / sum);
        let one = gated(activation, &experts[e], h);
        add(&mut out, &one.into_iter().map(|x| weight * x).collect::<Vec<_>>());
    }
    out
}

/// All positions' logits, `[tokens, vocab]` flat, widened to f64.
pub fn logits<R: Real>(model: &Model, tokens: &[u32], set: Setting) -> Vec<f64> {
    let (c, w) = (&model.config, &model.weights);
    let tables: Vec<(Vec<f64>, R)> = c
        .ropes
        .iter()
        .map(|r| (rope::inv_freq(r, c.rotary_dim, set.length), R::of(r.attention_factor)))
        .collect();
    let embed_scale = R::of(if c.family.scaled_embedding { (c.hidden_size as f64).sqrt() } else { 1.0 });
    let embed = w.embed.to_f32();
    let row = |t: u32| {
        embed[t as usize * c.hidden_size..][..c.hidden_size]
            .iter()
            .map(|&x| embed_scale * R::of(f64::from(x)))
    };
    let mut x: Vec<Vec<R>> = tokens.iter().map(|&t| row(t).collect()).collect();
    let store = |y: Vec<R>| -> Vec<R> {
        if !set.bf16_kv {
            return y;
        }
        y.into_iter().map(|v| R::of(f64::from(bf16::from_f64(v.to())))).collect()
    };
    for (config, layer) in c.layers.iter().zip(&w.layers) {
        let heads = plain_heads(model);
        let mut q = Vec::new();
        let mut k = vec![vec![R::of(0.0); heads.num_kv_heads * heads.head_dim_qk]; set.zero_keys];
        let mut v = vec![vec![R::of(0.0); heads.num_kv_heads * heads.head_dim_v]; set.zero_keys];
        for (i, x) in x.iter().enumerate() {
            let h = norm(x, &layer.attn_norm, c.rms_norm_eps);
            let table = config.rope.map(|r| &tables[r]);
            let [qi, ki, vi] = qkv(model, layer, &h, set.start + i, table, store);
            q.push(qi);
            k.push(ki);
            v.push(vi);
        }
        let mask = config.window.map_or(Mask::CAUSAL, Mask::window);
        let o = attend(model, layer.sinks.as_deref(), mask, &q, &k, &v);
        let after = |y: Vec<R>, w: &Option<Vec<f32>>| match w {
            Some(w) => norm(&y, w, c.rms_norm_eps),
            None => y,
        };
        for (x, o) in x.iter_mut().zip(&o) {
            add(x, &after(matvec(&layer.o, o), &layer.post_attn_norm));
            let Some(ffn) = &layer.ffn else { continue };
            let h = norm(x, &ffn.norm, c.rms_norm_eps);
            add(x, &after(mlp(model, &ffn.mlp, &h), &ffn.post_norm));
        }
    }
    let head = Linear::from(w.lm_head.clone());
    let last = |x: &Vec<R>| matvec(&head, &norm(x, &w.final_norm, c.rms_norm_eps));
    let cap = |x: R| c.logit_softcap.map_or(x, |cap| softcap(x, cap));
    x.iter().flat_map(|x| last(x).into_iter().map(|x| cap(x).to())).collect()
}

/// What a stack may differ from the oracle: twice what plain arithmetic in f32 differs, plus one rounding of the largest logit.
pub struct Bound {
    pub exact: Vec<f64>,
    pub tolerance: f64,
}

impl Bound {
    pub fn new(model: &Model, tokens: &[u32], set: Setting) -> Bound {
        // The oracle keeps exact keys and values: what a bf16 cache loses is part of what plain arithmetic loses.
        let exact = logits::<f64>(model, tokens, Setting { bf16_kv: false, ..set });
        let plain = logits::<f32>(model, tokens, set);
        let off = exact.iter().zip(&plain).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        let largest = exact.iter().fold(0.0f64, |m, x| m.max(x.abs()));
        Bound { exact, tolerance: 2.0 * off + largest * f64::from(f32::EPSILON) }
    }

    /// Panics when `got`, the logits from row `first` on, is further away than the tolerance.
    pub fn check(&self, what: &str, first_elem: usize, got: &[f32]) {
        assert!(
            first_elem + got.len() <= self.exact.len() && !got.is_empty(),
            "{what}: {} logits",
            got.len()
        );
        for (i, (&g, &e)) in got.iter().zip(&self.exact[first_elem..]).enumerate() {
            let off = (f64::from(g) - e).abs();
            assert!(
                off <= self.tolerance,
                "{what}: logit {i}: {g} for {e}, off {off:e}, allowed {:e}",
                self.tolerance
            );
        }
    }
}
