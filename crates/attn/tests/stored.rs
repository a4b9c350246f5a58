//! Stored types of K and V against the oracle on what they stand for: types × scales × layouts × masks × instruction sets, and poison.

mod common;
use common::*;
use suanpan_attn::{
    Args, Extras, KvLayout, KvScales, Limits, Machine, Plan, Problem, Scores, Strides, Workspace, run,
};
use suanpan_base::{BadArgument, Buf, BufMut, DType, HeadShape, Mask, ScaleGrain, SeqLen};
use suanpan_ledger::AttnBooks;

const STORED: [DType; 5] = [DType::F16, DType::E4m3, DType::E5m2, DType::I8, DType::I4];
const CODES: [DType; 4] = [DType::E4m3, DType::E5m2, DType::I8, DType::I4];
const Q_TYPES: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];
const PAGES: [Option<usize>; 5] = [None, Some(16), Some(1), Some(64), Some(100)];
const MASKS: [Mask; 4] =
    [Mask::FULL, Mask::CAUSAL, Mask::window(57), Mask { left: Some(130), right: Some(5), ..Mask::FULL }];

fn allowed(c: &Case) -> bool {
    let scales = c.kv_scales == ScaleGrain::None || c.kv_dtype.is_code();
    scales && (c.kv_scales != ScaleGrain::Page || c.page_size.is_some())
}

#[test]
fn every_type_grain_and_layout_agrees_on_every_instruction_set() {
    for machine in machines() {
        let mut n = 0;
        for kv_dtype in STORED {
            for kv_scales in ScaleGrain::ALL {
                for page_size in [None, PAGES[1 + n / 2 % 4]] {
                    let d = [64, 128, 40, 256, 2, 96, 136][n % 7];
                    let group = [(4, 2), (3, 3), (8, 2), (5, 1)][n % 4];
                    let lengths = [(37, 150), (1, 131), (2, 300), (9, 9), (1, 1030), (3, 2)];
                    let c = Case::new(HeadShape::new(group.0, group.1, d), MASKS[n % 4], &lengths);
                    let c = c.dtypes(Q_TYPES[n % 3], kv_dtype).scaled(kv_scales);
                    let c = Case { page_size, seed: n as u64 + 1, ..c };
                    if allowed(&c) {
                        let data = Data::random(&c);
                        judge(&c, &data, &run_case(&c, &data, &machine, POISONS[n % 3]));
                    }
                    n += 1;
                }
            }
        }
    }
}

#[test]
fn long_decodes_of_integers_agree_with_the_oracle() {
    // Splits, whole blocks, groups of every size, peaked and flat scores, caps and sinks; widths of one and of several vectors of bytes.
    let scores =
        [Scores::default(), Scores { softcap: Some(20.0), alibi: true, sink: true, ..Scores::default() }];
    let mut n = 0;
    for kv_dtype in [DType::I8, DType::I4] {
        for (q_heads, kv_heads) in [(1, 1), (4, 1), (8, 2), (3, 1), (12, 1)] {
            for scale in [0.02, 1.0, 8.0] {
                let dqk = [128, 64, 576, 30][n % 4];
                let heads = HeadShape::with_widths(q_heads, kv_heads, dqk, 128 << (n % 2));
                let mut c = Case::new(heads, Mask::CAUSAL, &[(1, 4099), (1, 777), (2, 260)])
                    .dtypes(Q_TYPES[n % 3], kv_dtype)
                    .scaled([ScaleGrain::Token, ScaleGrain::Head][n % 2])
                    .scale(scale / (dqk as f32).sqrt())
                    .scores(scores[n / 2 % 2]);
                (c.page_size, c.seed) = (PAGES[n % 4], n as u64 + 7);
                let data = Data::random(&c);
                for machine in machines() {
                    judge(&c, &data, &run_case(&c, &data, &machine, f32::NAN));
                }
                n += 1;
            }
        }
    }
}

#[test]
fn outlier_channels_of_q_lose_no_more_than_plain_attention() {
    for kv_dtype in [DType::I8, DType::I4] {
        for q_dtype in Q_TYPES {
            let c = Case::new(HeadShape::new(4, 1, 128), Mask::CAUSAL, &[(1, 900)]).dtypes(q_dtype, kv_dtype);
            let c = c.scaled(ScaleGrain::Token);
            let mut data = Data::random(&c);
            for (i, x) in data.q.iter_mut().enumerate() {
                *x = if i % 128 == 77 { on_grid(*x * 100.0, q_dtype) } else { *x };
            }
            for machine in machines() {
                judge(&c, &data, &run_case(&c, &data, &machine, f32::NAN));
            }
        }
    }
}

#[test]
fn threads_batch_and_layout_change_no_bit_with_scales() {
    for kv_dtype in CODES {
        for kv_scales in [ScaleGrain::Tensor, ScaleGrain::Head] {
            let lengths = [(1, 700), (3, 40), (30, 90), (1, 2000)];
            let c =
                Case::new(HeadShape::new(8, 2, 128), Mask::CAUSAL, &lengths).dtypes(DType::Bf16, kv_dtype);
            let c = c.scaled(kv_scales);
            let data = Data::random(&c);
            let first = run_case(&c, &data, &machine(1), f32::NAN);
            for (threads, page_size) in [(2, None), (3, Some(16)), (1, Some(100)), (2, Some(64))] {
                let c = Case { page_size, ..c.clone() };
                let r = pool(threads).install(|| run_case(&c, &data, &machine(threads), f32::NAN));
                assert_eq!(
                    (&r.out, &r.lse),
                    (&first.out, &first.lse),
                    "{threads} threads, pages {page_size:?}"
                );
            }
            // The last sequence alone.
            let alone = Case { seqs: vec![c.seqs[3]], ..c.clone() };
            let tail = |x: &[f32], n: usize| x[x.len() - n..].to_vec();
            let part =
                Data { q: tail(&data.q, 1024), k: tail(&data.k, 2000 * 256), v: tail(&data.v, 2000 * 256) };
            assert_eq!(run_case(&alone, &part, &machine(1), f32::NAN).out, tail(&first.out, 1024));
        }
    }
}

#[test]
fn a_row_that_sees_one_key_returns_its_value_exactly() {
    for machine in machines() {
        for kv_dtype in STORED {
            for rows in [1, 20] {
                let c = Case::new(HeadShape::new(2, 1, 128), Mask::window(1), &[(rows, 300)]);
                let c = c.dtypes(DType::F32, kv_dtype);
                let data = Data::random(&c);
                let r = run_case(&c, &data, &machine, f32::NAN);
                for (row, out) in r.out.chunks(256).enumerate() {
                    let v = &data.v[(300 - rows + row) * 128..][..128];
                    assert_eq!((&out[..128], &out[128..]), (v, v), "{machine} {kv_dtype} row {row}");
                }
            }
        }
    }
}

/// One kv head of int8 keys and values of width 64, a scale a token.
struct Tokens {
    plan: Plan,
    q: Vec<f32>,
    kv: Vec<i8>,
    scales: [Vec<f32>; 2],
    out: Vec<f32>,
}

impl Tokens {
    fn new(machine: &Machine, rows: usize, keys: usize, grain: ScaleGrain) -> Tokens {
        let c =
            Case::new(HeadShape::new(1, 1, 64), Mask::CAUSAL, &[(rows, keys)]).dtypes(DType::F32, DType::I8);
        Tokens {
            // Scales of this seed are f32.
            plan: Case { seed: 3, ..c.scaled(grain) }.plan(machine),
            q: vec![0.01; rows * 64],
            kv: (0..keys * 64).map(|i| (i % 251) as i8).collect(),
            scales: [vec![0.01; keys], vec![0.01; keys]],
            out: vec![-1.0; rows * 64],
        }
    }

    fn run(&mut self, change: impl FnOnce(&mut Args<'_>)) -> Result<(), BadArgument> {
        let strides = Strides { token: 64, head: 64, page: 0 };
        let scale_strides = Strides { token: 1, head: 1, page: 0 };
        let mut args = Args {
            kv_scales: KvScales {
                k: Buf::F32(&self.scales[0]),
                k_strides: scale_strides,
                v: Buf::F32(&self.scales[1]),
                v_strides: scale_strides,
            },
            extras: Extras::default(),
            max_scores: None,
            q: Buf::F32(&self.q),
            q_strides: (64, 64),
            k: Buf::I8(&self.kv),
            k_strides: strides,
            v: Buf::I8(&self.kv),
            v_strides: strides,
            page_table: &[],
            page_table_stride: 0,
            out: BufMut::F32(&mut self.out),
            out_strides: (64, 64),
            lse: None,
        };
        change(&mut args);
        run(&self.plan, args, &mut Workspace::for_plans(&[&self.plan]), &mut [AttnBooks::default()])
    }
}

#[test]
fn a_bad_scale_of_a_token_reaches_exactly_the_rows_that_see_it() {
    for machine in machines() {
        for (rows, keys, bad) in [(40, 40, 29), (3, 40, 38), (200, 200, 131), (2, 700, 699), (13, 700, 690)] {
            for poison in [f32::NAN, f32::INFINITY, -1.0] {
                for side in [0, 1] {
                    let mut t = Tokens::new(&machine, rows, keys, ScaleGrain::Token);
                    t.scales[side][bad] = poison;
                    t.run(|_| ()).unwrap();
                    for row in 0..rows {
                        let sees = row + keys - rows >= bad;
                        let out = &t.out[row * 64..][..64];
                        let clean = out.iter().all(|x| x.is_finite());
                        assert!(clean != sees, "{machine} side {side} scale {poison}: row {row} of {rows}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_nan_code_in_a_masked_value_leaks_into_rows_that_may_not_see_it() {
    for kv_dtype in [DType::F16, DType::E4m3, DType::E5m2] {
        for (rows, keys, bad) in [(40, 40, 29), (3, 40, 38)] {
            let c = Case::new(HeadShape::new(2, 1, 64), Mask::CAUSAL, &[(rows, keys)])
                .dtypes(DType::F32, kv_dtype);
            let mut data = Data::random(&c);
            data.v[bad * 64] = f32::NAN;
            for m in machines() {
                let r = run_case(&c, &data, &m, f32::NAN);
                for row in 0..rows {
                    let sees = row + keys - rows >= bad;
                    assert_eq!(r.out[row * 128].is_nan(), sees, "{m} {kv_dtype} row {row} of {rows}");
                    assert!(r.out[row * 128 + 1].is_finite(), "{m} {kv_dtype} row {row} of {rows}");
                }
            }
        }
    }
}

#[test]
fn bad_scales_and_strides_are_refused_by_name_before_anything_is_read() {
    let m = machine(1);
    let field = |grain, change: &dyn Fn(&mut Args<'_>)| {
        let mut t = Tokens::new(&m, 2, 50, grain);
        let e = t.run(change).unwrap_err();
        assert!(t.out.iter().all(|&x| x == -1.0), "{e}: the output was touched");
        e.field
    };
    assert_eq!(field(ScaleGrain::Token, &|a| a.kv_scales.k = Buf::F32(&[0.5; 49])), "k_scales length");
    assert_eq!(field(ScaleGrain::Token, &|a| a.kv_scales.v = Buf::F32(&[])), "v_scales length");
    assert_eq!(field(ScaleGrain::Token, &|a| a.kv_scales.v_strides.token = 2), "v_scales length");
    assert_eq!(
        field(ScaleGrain::Token, &|a| a.kv_scales.k_strides.token = usize::MAX / 3),
        "k_scales strides"
    );
    assert_eq!(field(ScaleGrain::None, &|_| ()), "k_scales length");
    assert_eq!(field(ScaleGrain::Tensor, &|a| a.kv_scales.k = Buf::F32(&[])), "k_scales length");
    assert_eq!(field(ScaleGrain::Token, &|a| a.kv_scales.k = Buf::F16(&[])), "k_scales dtype");
    for bad in [&[f32::NAN], &[f32::INFINITY], &[-0.5]] {
        assert_eq!(field(ScaleGrain::Tensor, &|a| a.kv_scales.k = Buf::F32(bad)), "k_scales[0]");
        assert_eq!(field(ScaleGrain::Head, &|a| a.kv_scales.v = Buf::F32(bad)), "v_scales[0]");
    }
    assert_eq!(field(ScaleGrain::Tensor, &|a| a.k = Buf::E4m3(&[0; 3200])), "k dtype");
    let problem = |kv_dtype, kv_scales, kv, d| {
        let c = Case::new(HeadShape::new(2, 1, d), Mask::CAUSAL, &[])
            .dtypes(DType::F32, kv_dtype)
            .scaled(kv_scales);
        Problem { kv, ..c.problem() }.check().unwrap_err().field
    };
    let (plain, paged) = (KvLayout::Contiguous, KvLayout::Paged { page_size: 16 });
    assert_eq!(problem(DType::Bf16, ScaleGrain::Head, paged, 64), "kv_scales");
    assert_eq!(problem(DType::I8, ScaleGrain::Page, plain, 64), "kv_scales");
    assert_eq!(problem(DType::I4, ScaleGrain::None, plain, 63), "head_dim_qk");
    let q = Case::new(HeadShape::new(2, 1, 64), Mask::CAUSAL, &[]).dtypes(DType::I8, DType::I8).problem();
    assert_eq!(q.check().unwrap_err().field, "q_dtype");
}

#[test]
fn values_given_beside_the_keys_that_hold_them_are_refused_by_name() {
    let c = Case::new(HeadShape::latent(1, 64, 64), Mask::CAUSAL, &[(2, 50)]).dtypes(DType::F32, DType::I8);
    let plan = Case { seed: 3, ..c.scaled(ScaleGrain::Token) }.plan(&machine(1));
    const CODES: &[i8] = &[1; 3200];
    let field = |v: Buf<'static>, scales: &'static [f32]| {
        let mut t = Tokens { plan: plan.clone(), ..Tokens::new(&machine(1), 2, 50, ScaleGrain::Token) };
        let result = t.run(|a| (a.v, a.kv_scales.v) = (v, Buf::F32(scales)));
        assert_eq!(result.is_err(), t.out.iter().all(|&x| x == -1.0), "a refused call left traces");
        result.err().map_or(String::new(), |e| e.field)
    };
    assert_eq!(field(Buf::I8(&[]), &[]), "");
    assert_eq!(field(Buf::I8(CODES), &[]), "v length");
    assert_eq!(field(Buf::I8(&[]), &[0.5; 50]), "v_scales length");
    assert_eq!(field(Buf::F32(&[]), &[]), "v dtype");
}

#[test]
fn int4_strides_that_split_a_byte_and_pages_without_scales_are_refused() {
    let c =
        Case::new(HeadShape::new(2, 2, 64), Mask::CAUSAL, &[(1, 40)]).dtypes(DType::F32, DType::I4).paged(16);
    let field = |grain, k_strides: Strides, scales: usize, table: [u32; 3]| {
        let plan = Case { seed: 3, ..c.clone().scaled(grain) }.plan(&machine(1));
        let (q, codes, mut out) = (vec![0.0; 128], vec![0u8; 4096], vec![-1.0; 128]);
        let scales = vec![1.0; scales];
        let scale_strides = Strides { token: 1, head: 16, page: 32 };
        let args = Args {
            kv_scales: KvScales {
                k: Buf::F32(&scales),
                k_strides: scale_strides,
                v: Buf::F32(&scales),
                v_strides: scale_strides,
            },
            extras: Extras::default(),
            max_scores: None,
            q: Buf::F32(&q),
            q_strides: (128, 64),
            k: Buf::I4(&codes),
            k_strides,
            v: Buf::I4(&codes),
            v_strides: Strides { token: 64, head: 1024, page: 2048 },
            page_table: &table,
            page_table_stride: 3,
            out: BufMut::F32(&mut out),
            out_strides: (128, 64),
            lse: None,
        };
        let refused = run(&plan, args, &mut Workspace::for_plans(&[&plan]), &mut [AttnBooks::default()]);
        assert_eq!(out.iter().all(|&x| x == -1.0), refused.is_err());
        refused.err().map_or(String::new(), |e| e.field)
    };
    let even = Strides { token: 64, head: 1024, page: 2048 };
    // 8192 elements are four pages.
    assert_eq!(field(ScaleGrain::Token, even, 128, [3, 0, 1]), "");
    assert_eq!(field(ScaleGrain::Token, even, 128, [4, 0, 1]), "page_table[0][0]");
    assert_eq!(field(ScaleGrain::Token, even, 96, [2, 0, 1]), "");
    assert_eq!(field(ScaleGrain::Token, even, 96, [2, 3, 1]), "page_table[0][1]");
    assert_eq!(field(ScaleGrain::Page, even, 17 + 3 * 32, [2, 3, 1]), "");
    assert_eq!(field(ScaleGrain::Page, even, 16 + 3 * 32, [2, 3, 1]), "page_table[0][1]");
    for odd in [Strides { token: 65, ..even }, Strides { head: 1023, ..even }, Strides { page: 2049, ..even }]
    {
        assert_eq!(field(ScaleGrain::Token, odd, 128, [3, 0, 1]), "k strides");
    }
    let narrow = SeqLen::new(1, 40);
    let limits = Limits { max_seqs: 1, max_total_q: 1, max_seqlen_k: 40 };
    let f32_scales = Case { seed: 3, ..c.clone().scaled(ScaleGrain::Page) };
    let plan = Plan::new(&f32_scales.problem(), &machine(1), limits).unwrap();
    assert_eq!(plan.predicted(narrow).kv_read_bytes, 40 * 2 * 64 + 3 * 2 * 8);
}
