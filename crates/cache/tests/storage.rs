//! Every write lands in its own slot and nowhere else, whatever the page table, the heads and the type.

use half::bf16;
use proptest::prelude::*;
use suanpan_base::{Buf, DType, HeadShape};
use suanpan_cache::{Group, KvStorage, LayerShape, PagePool, PageTable};

fn shape(num_kv_heads: usize, head_dim_qk: usize, head_dim_v: usize, dtype: DType) -> LayerShape {
    let heads = HeadShape::with_widths(num_kv_heads, num_kv_heads, head_dim_qk, head_dim_v);
    LayerShape { heads, dtype }
}

/// A value that names where it belongs; every one is exact in bf16.
fn value(side: usize, token: usize, head: usize, dim: usize) -> f32 {
    let bits = 0x3f80 + ((side * 31 + token * 7 + head * 3 + dim) % 0x3000) as u16;
    bf16::from_bits(bits).to_f32()
}

fn fill_with_nan(storage: &mut KvStorage, layer: usize, shape: LayerShape) {
    let slots: Vec<u64> = (0..(storage.num_pages() * storage.page_size()) as u64).collect();
    let rows = |head_dim: usize| vec![f32::NAN; slots.len() * shape.heads.num_kv_heads * head_dim];
    storage.write(layer, &slots, &rows(shape.heads.head_dim_qk), &rows(shape.heads.head_dim_v));
}

/// Finds element (page, head, slot, dim) through the strides.
fn at(
    buf: Buf<'_>,
    strides: (usize, usize, usize),
    page: usize,
    head: usize,
    slot: usize,
    dim: usize,
) -> f32 {
    buf.get(page * strides.2 + head * strides.1 + slot * strides.0 + dim)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn each_written_row_is_found_at_its_slot_and_the_rest_stays_nan(
        page_size in 1usize..9, kv_heads in 1usize..4, dims in (1usize..20, 1usize..20),
        tokens in 0usize..20, order in any::<u64>(), wide in any::<bool>(),
    ) {
        let dtype = if wide { DType::F32 } else { DType::Bf16 };
        let shape = shape(kv_heads, dims.0, dims.1, dtype);
        let num_pages = 24;
        let mut storage = KvStorage::new(&[shape, shape], num_pages, page_size).unwrap();
        for layer in 0..2 {
            fill_with_nan(&mut storage, layer, shape);
        }
        // A table whose ids are in no order: pages are taken one by one and some are given back in between.
        let pool = PagePool::new(num_pages, page_size).unwrap();
        let mut all: Vec<_> = std::iter::from_fn(|| pool.alloc()).collect();
        let mut x = order | 1;
        while !all.is_empty() {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            drop(all.swap_remove((x >> 33) as usize % all.len()));
        }
        let mut table = PageTable::new(&pool);
        table.reserve(tokens).unwrap();
        let slots: Vec<u64> = (0..tokens).map(|p| table.slot(p)).collect();
        let rows = |side: usize, head_dim: usize| -> Vec<f32> {
            (0..tokens * kv_heads * head_dim)
                .map(|i| value(side, i / head_dim / kv_heads, i / head_dim % kv_heads, i % head_dim))
                .collect()
        };
        let written = storage.write(1, &slots, &rows(0, dims.0), &rows(1, dims.1));
        prop_assert_eq!(written, (tokens * kv_heads * (dims.0 + dims.1) * dtype.bytes_of(1)) as u64);

        for (side, head_dim, buf, strides) in [
            (0, dims.0, storage.k(1), storage.k_strides(1)),
            (1, dims.1, storage.v(1), storage.v_strides(1)),
        ] {
            prop_assert_eq!((strides.0, strides.1), (head_dim, page_size * (dims.0 + dims.1)));
            let mut numbers = 0;
            for page in 0..num_pages {
                let token = |slot| table.ids().iter().position(|&id| id as usize == page).map(|i| i * page_size + slot);
                for (head, slot) in (0..kv_heads).flat_map(|h| (0..page_size).map(move |s| (h, s))) {
                    for dim in 0..head_dim {
                        let found = at(buf, strides, page, head, slot, dim);
                        numbers += usize::from(!found.is_nan());
                        if let Some(token) = token(slot).filter(|&t| t < tokens) {
                            prop_assert_eq!(found, value(side, token, head, dim));
                        }
                    }
                }
            }
            prop_assert_eq!(numbers, tokens * kv_heads * head_dim, "nothing else was written");
        }
        for (buf, strides, head_dim) in [
            (storage.k(0), storage.k_strides(0), dims.0),
            (storage.v(0), storage.v_strides(0), dims.1),
        ] {
            let mut all = (0..num_pages * kv_heads * page_size * head_dim).map(|i| {
                let (row, dim) = (i / head_dim, i % head_dim);
                let (page, head, slot) = (row / page_size / kv_heads, row / page_size % kv_heads, row % page_size);
                at(buf, strides, page, head, slot, dim)
            });
            prop_assert!(all.all(f32::is_nan), "the other layer was written");
        }
    }
}

#[test]
fn sizes_are_exact_and_new_storage_is_zero() {
    let layers = [shape(3, 64, 64, DType::Bf16), shape(2, 96, 32, DType::F32)];
    let storage = KvStorage::new(&layers, 5, 16).unwrap();
    let per_page = 16 * (3 * 128 * 2 + 2 * 128 * 4);
    assert_eq!((storage.bytes_per_page(), storage.bytes()), (per_page, 5 * per_page));
    assert_eq!(storage.layer(1), layers[1]);
    assert_eq!(storage.k_strides(1), (96, 16 * 128, per_page / 4));
    assert!((0..storage.v(1).len()).all(|i| storage.v(1).get(i) == 0.0));
}

/// Latent attention stores a key that holds its value: no byte for values, one scale a token.
#[test]
fn keys_that_hold_their_values_take_no_room_for_values() {
    let heads = HeadShape::latent(16, 6, 4);
    for (dtype, token_bytes) in [(DType::Bf16, 12), (DType::I8, 8)] {
        let layer = LayerShape { heads, dtype };
        let mut storage = KvStorage::new(&[layer, layer], 3, 4).unwrap();
        assert_eq!((layer.bytes(10), storage.bytes_per_page()), (10 * token_bytes, 2 * 64));
        let slots = [9, 2];
        let rows: Vec<f32> = (1..=12).map(|i| i as f32).collect();
        assert_eq!(storage.write(1, &slots, &rows, &[]), 2 * token_bytes);
        assert!(storage.v(1).is_empty() && storage.v(1).dtype() == dtype && storage.v_scales(1).is_empty());
        let scale = |page: usize, slot: usize| match dtype {
            DType::I8 => storage.k_scales(1).get(page * storage.scale_strides(1).2 + slot),
            _ => 1.0,
        };
        for (row, (page, slot)) in rows.chunks(6).zip([(2, 1), (0, 2)]) {
            for (dim, want) in row.iter().enumerate() {
                let found = at(storage.k(1), storage.k_strides(1), page, 0, slot, dim) * scale(page, slot);
                assert!(
                    (found - want).abs() <= 0.51 * scale(page, slot) * f32::from(u8::from(dtype.is_code())),
                    "{found} for {want}"
                );
            }
        }
        let other = storage.k(0);
        let strides = storage.k_strides(0);
        assert!((0..3 * 4).all(|i| (0..6).all(|d| at(other, strides, i / 4, 0, i % 4, d) == 0.0)));
    }
}

#[test]
fn impossible_storage_is_refused_before_it_is_allocated() {
    let layer = shape(8, 128, 128, DType::Bf16);
    let field = |layers: &[LayerShape], pages, size| KvStorage::new(layers, pages, size).err().unwrap().field;
    assert_eq!(field(&[], 1, 1), "layers");
    assert_eq!(field(&[layer], 0, 1), "num_pages");
    assert_eq!(field(&[layer], 1, 0), "page_size");
    assert_eq!(field(&[shape(0, 1, 1, DType::F32)], 1, 1), "num_q_heads");
    assert!(field(&[layer], usize::MAX / 2, 16).contains("num_pages"));
    assert!(field(&[shape(8, usize::MAX / 2, 1, DType::F32)], 1, 16).contains("head_dim"));
    let e = KvStorage::new(&[layer; 32], 1 << 30, 16).err().unwrap().to_string();
    assert!(e.contains(&(32u64 * (1 << 34) * 4096).to_string()), "{e}");
}

#[test]
#[should_panic(expected = "slot 32 of 32")]
fn a_slot_past_the_storage_is_not_written() {
    let mut storage = KvStorage::new(&[shape(1, 2, 2, DType::F32)], 2, 16).unwrap();
    storage.write(0, &[0, 32], &[1.0; 4], &[1.0; 4]);
}

#[test]
#[should_panic(expected = "values of 2 tokens")]
fn rows_that_do_not_fit_the_slots_are_not_written() {
    let mut storage = KvStorage::new(&[shape(1, 2, 2, DType::F32)], 2, 16).unwrap();
    storage.write(0, &[0, 1], &[1.0; 4], &[1.0; 3]);
}

/// Untouched pages cost no memory: a pool sized for the longest context is free until it is used.
#[cfg(target_os = "linux")]
#[test]
fn storage_becomes_resident_only_as_it_is_written() {
    let resident = || -> u64 {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
    };
    let before = resident();
    let layer = shape(8, 128, 128, DType::F32);
    let mut storage = KvStorage::new(&[layer; 4], 4096, 16).unwrap();
    assert_eq!(storage.bytes(), 4 * 4096 * 16 * 8192);
    storage.write(2, &[77], &[1.0; 1024], &[1.0; 1024]);
    let grown = resident().saturating_sub(before);
    assert!(grown < 64 << 20, "{grown} bytes became resident of {}", storage.bytes());
}

/// Rows of every stored type come back through their strides and scales, wherever their slots lie and whatever is written later.
#[test]
fn codes_and_their_scales_are_found_at_their_slots() {
    let (kv_heads, dims, page_size, pages) = (3, (64, 32), 16, 7);
    let mut x = 3u32;
    let mut random = || {
        x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        x as i32 as f32 / i32::MAX as f32
    };
    for (dtype, step) in [(DType::F16, 1e-3), (DType::E4m3, 0.036), (DType::I8, 0.0041), (DType::I4, 0.073)] {
        let shape = shape(kv_heads, dims.0, dims.1, dtype);
        let mut storage = KvStorage::new(&[shape, shape], pages, page_size).unwrap();
        assert_eq!(storage.bytes_per_page(), suanpan_cache::bytes_per_page(&[shape; 2], page_size).unwrap());
        let mut slots: Vec<u64> = (0..(pages * page_size) as u64).collect();
        (1..slots.len()).for_each(|i| slots.swap(i, (random().abs() * i as f32) as usize));
        let rows = |dim: usize, random: &mut dyn FnMut() -> f32| -> Vec<f32> {
            // Heads and tokens of very different sizes: a scale taken from a neighbour shows.
            (0..slots.len() * kv_heads * dim)
                .map(|i| random() * 2f32.powi((i / dim % 11) as i32 * 3 - 15))
                .collect()
        };
        let (k, v) = (rows(dims.0, &mut random), rows(dims.1, &mut random));
        for (i, slot) in slots.iter().enumerate() {
            let row = |all: &[f32], dim: usize| all[i * kv_heads * dim..(i + 1) * kv_heads * dim].to_vec();
            let written = storage.write(1, &[*slot], &row(&k, dims.0), &row(&v, dims.1));
            assert_eq!(written, shape.bytes(1));
        }
        let sides = [
            (&k, dims.0, storage.k(1), storage.k_strides(1), storage.k_scales(1)),
            (&v, dims.1, storage.v(1), storage.v_strides(1), storage.v_scales(1)),
        ];
        for (rows, dim, codes, strides, scales) in sides {
            for (i, row) in rows.chunks_exact(dim).enumerate() {
                let (slot, head) = (slots[i / kv_heads] as usize, i % kv_heads);
                let (page, slot) = (slot / page_size, slot % page_size);
                let s = storage.scale_strides(1);
                let scale =
                    if scales.is_empty() { 1.0 } else { scales.get(page * s.2 + head * s.1 + slot * s.0) };
                let top = row.iter().fold(0f32, |m, x| m.max(x.abs()));
                for (j, &x) in row.iter().enumerate() {
                    let found = at(codes, strides, page, head, slot, j) * scale;
                    // f16 has 2^-24 as its smallest step.
                    assert!((found - x).abs() <= step * top + 6e-8, "{dtype}: {x} became {found}");
                }
            }
        }
        assert!((0..storage.k_scales(0).len().min(64)).all(|i| storage.k_scales(0).get(i) == 0.0));
    }
}

/// C23: a page copied takes its scales along.
#[test]
fn c23_a_copied_page_keeps_its_own_scales() {
    let shape = shape(2, 8, 8, DType::I8);
    let mut storage = KvStorage::new(&[shape; 3], 4, 4).unwrap();
    for layer in 0..3 {
        for slot in 0..16u64 {
            let row = [(slot + 1) as f32 * 10f32.powi(layer as i32); 16];
            storage.write(layer, &[slot], &row, &row);
        }
    }
    storage.copy_page(Group::Full, 1, 3);
    assert_eq!(storage.page(Group::Full, 1), storage.page(Group::Full, 3));
    let (strides, scales) = (storage.scale_strides(2), storage.v_scales(2));
    for slot in 0..4 {
        let found = at(storage.v(2), storage.v_strides(2), 3, 1, slot, 7)
            * scales.get(3 * strides.2 + strides.1 + slot);
        assert!((found - (slot + 5) as f32 * 100.0).abs() < 5.0, "{found}");
    }
}

#[test]
fn capacity_of_each_type_at_width_64() {
    let per_page = |dtype| suanpan_cache::bytes_per_page(&[shape(3, 64, 64, dtype); 30], 16).unwrap() as f64;
    let ratio = |dtype| per_page(DType::Bf16) / per_page(dtype);
    assert!(ratio(DType::I8) >= 1.9 && ratio(DType::E4m3) >= 1.9 && ratio(DType::I4) >= 3.4);
    let refused = suanpan_cache::bytes_per_page(&[shape(3, 64, 64, DType::E5m2)], 16).unwrap_err();
    assert_eq!(refused.field, "dtype");
    assert_eq!(
        suanpan_cache::bytes_per_page(&[shape(3, 63, 64, DType::I4)], 16).unwrap_err().field,
        "head_dim_qk"
    );
}
