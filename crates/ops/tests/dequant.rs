//! Every weight format against the reference values that the `gguf` package computes (fixtures/make_dequant.py), bit by bit.

use suanpan_ops::{Weight, WeightFormat, embed};

/// The fixture's records: format, bytes, expected values.
fn records() -> Vec<(WeightFormat, &'static [u8], Vec<f32>)> {
    let mut rest: &'static [u8] = include_bytes!("fixtures/gguf_dequant.bin");
    let mut found = Vec::new();
    while !rest.is_empty() {
        let name = std::str::from_utf8(&rest[..8]).unwrap().trim_end_matches('\0');
        let word = |at: usize| u32::from_le_bytes(rest[at..at + 4].try_into().unwrap()) as usize;
        let (bytes, elems) = (word(8), word(12));
        let format = WeightFormat::ALL.into_iter().find(|f| f.name() == name).unwrap();
        let values = rest[16 + bytes..16 + bytes + 4 * elems].as_chunks::<4>().0;
        let values = values.iter().map(|b| f32::from_le_bytes(*b)).collect();
        found.push((format, &rest[16..16 + bytes], values));
        rest = &rest[16 + bytes + 4 * elems..];
    }
    found
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn every_format_dequantises_bit_for_bit_as_the_gguf_package_does() {
    let records = records();
    assert_eq!(records.len(), WeightFormat::ALL.len());
    for (format, bytes, want) in records {
        for rows in [1, 2] {
            let cols = want.len() / rows;
            let w = Weight::new(format, rows, cols, bytes).unwrap();
            let mut got = vec![f32::NAN; want.len()];
            for r in 0..rows {
                w.dequantize_row(r, &mut got[r * cols..(r + 1) * cols]);
            }
            assert_eq!(bits(&got), bits(&want), "{format}, {rows} rows");
        }
    }
}

#[test]
fn an_embedding_row_is_the_dequantised_row_of_its_id() {
    for (format, bytes, want) in records() {
        let table = Weight::new(format, 2, want.len() / 2, bytes).unwrap();
        let mut got = vec![f32::NAN; 3 * want.len() / 2];
        embed(table, &[1, 0, 1], &mut got).unwrap();
        let (first, second) = want.split_at(want.len() / 2);
        assert_eq!(bits(&got), bits(&[second, first, second].concat()), "{format}");
    }
}

#[test]
fn an_id_outside_the_table_is_refused_by_position_and_nothing_is_written() {
    let table = Weight::new(WeightFormat::F32, 3, 2, &[0; 24]).unwrap();
    let mut out = [7.0; 4];
    let e = embed(table, &[2, 3], &mut out).unwrap_err();
    assert_eq!((e.field.as_str(), e.asked.as_str(), e.supported.as_str()), ("ids[1]", "3", "0..3"));
    assert_eq!(out, [7.0; 4]);
    assert_eq!(embed(table, &[2], &mut out).unwrap_err().field, "out");
}

#[test]
fn a_matrix_that_its_bytes_do_not_fill_is_refused_by_name() {
    let bytes = [0u8; 4096];
    let refusal = |format, rows, cols, len: usize| {
        let e = Weight::new(format, rows, cols, &bytes[..len]).unwrap_err();
        (e.field, e.asked, e.supported)
    };
    let (field, asked, supported) = refusal(WeightFormat::Q4_1, 2, 64, 79);
    assert_eq!(field, "data");
    assert!(asked.contains("79") && supported.contains("80"), "{asked} {supported}");
    assert_eq!(refusal(WeightFormat::Q4_1, 2, 64, 81).0, "data");
    let (field, asked, supported) = refusal(WeightFormat::Q6K, 1, 576, 420);
    assert_eq!((field.as_str(), asked.as_str()), ("cols", "576"));
    assert!(supported.contains("256"), "{supported}");
    assert_eq!(refusal(WeightFormat::F32, usize::MAX / 2, 16, 64).0, "rows");
    assert_eq!(refusal(WeightFormat::F32, 1, usize::MAX / 2, 64).0, "cols");
    assert_eq!(refusal(WeightFormat::Q8_0, 1, 1 << 30, 64).0, "cols");
    assert!(Weight::new(WeightFormat::Q4K, 0, 256, &[]).is_ok());
}
