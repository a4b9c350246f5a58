//! The GGUF container, versions 2 and 3: metadata and tensor table, checked against the file's length before anything is used.
//!
//! Does not know any architecture; that is `model.rs`. Format: the GGUF specification in the ggml repository (docs/gguf.md).

mod cursor;
pub mod model;
mod rope;
mod value;

use std::collections::BTreeMap;
use std::fmt::Display;
use std::ops::Range;
use std::path::Path;

use suanpan_ops::WeightFormat;

use crate::error::ModelError;
use crate::source::Source;
use crate::weights::Tensor;
use cursor::Cursor;
use value::Value;
pub use value::ValueType;

/// Longest metadata key, in bytes. The format allows 65,535; real keys stay below 100.
pub const MAX_KEY_BYTES: u64 = 1024;
/// Most metadata entries. Together with the key limit this bounds memory at 16 MiB.
pub const MAX_KEYS: u64 = 16_384;
/// Longest tensor name, in bytes, as the format says.
pub const MAX_TENSOR_NAME_BYTES: u64 = 64;
/// Most tensors.
pub const MAX_TENSORS: u64 = 65_536;
/// Most dimensions, as the format says.
pub const MAX_DIMS: u32 = 4;
/// Alignments accepted: powers of two in this range.
pub const ALIGNMENTS: std::ops::RangeInclusive<u64> = 8..=65_536;
const DEFAULT_ALIGNMENT: u64 = 32;

/// Names of the tensor types of the format that we cannot read, so that a refusal can name them.
const TYPE_NAMES: [(u32, &str); 16] = [
    (9, "Q8_1"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
];

/// An opened GGUF file whose header has been checked whole.
pub struct Gguf {
    source: Source,
    metadata: BTreeMap<Box<str>, Value>,
    tensors: BTreeMap<Box<str>, TensorInfo>,
}

/// One entry of the tensor table.
#[derive(Clone, Debug)]
pub struct TensorInfo {
    /// Element format.
    pub format: WeightFormat,
    /// Sizes, fastest-running first; unused ones are 1.
    pub dims: [usize; 4],
    /// How many of `dims` the file gave.
    pub num_dims: usize,
    /// Bytes of the data, counted from the start of the file.
    pub bytes: Range<usize>,
}

impl TensorInfo {
    /// The given sizes, fastest-running first.
    pub fn shape(&self) -> &[usize] {
        &self.dims[..self.num_dims]
    }
}

/// The weight format of a tensor type number.
fn weight_format(id: u32) -> Option<WeightFormat> {
    Some(match id {
        0 => WeightFormat::F32,
        1 => WeightFormat::F16,
        2 => WeightFormat::Q4_0,
        3 => WeightFormat::Q4_1,
        6 => WeightFormat::Q5_0,
        7 => WeightFormat::Q5_1,
        8 => WeightFormat::Q8_0,
        10 => WeightFormat::Q2K,
        11 => WeightFormat::Q3K,
        12 => WeightFormat::Q4K,
        13 => WeightFormat::Q5K,
        14 => WeightFormat::Q6K,
        20 => WeightFormat::Iq4Nl,
        23 => WeightFormat::Iq4Xs,
        30 => WeightFormat::Bf16,
        39 => WeightFormat::Mxfp4,
        _ => return None,
    })
}

impl Gguf {
    /// Maps and checks the file at `path`.
    pub fn open(path: &Path) -> Result<Gguf, ModelError> {
        Gguf::parse(Source::open(path)?)
    }

    /// Checks the header in `source`. Reads no tensor data.
    pub fn parse(source: Source) -> Result<Gguf, ModelError> {
        let mut cursor = Cursor::new(&source);
        check_magic(&mut cursor)?;
        // Name, dimension count, one dimension, type and offset; key, type and value: the least an entry can take.
        let tensor_count = cursor.count(MAX_TENSORS, 33, &"tensor count")?;
        let key_count = cursor.count(MAX_KEYS, 14, &"metadata count")?;
        let mut metadata = BTreeMap::new();
        for i in 0..key_count {
            let key = cursor.name(MAX_KEY_BYTES, &format_args!("metadata key {i} name"))?;
            let value = cursor.value(&format_args!("metadata {key}"))?;
            if metadata.insert(Box::from(key), value).is_some() {
                return Err(cursor.bad(&format_args!("metadata {key}"), "the key twice", "each key once"));
            }
        }
        let mut gguf = Gguf { source: source.clone(), metadata, tensors: BTreeMap::new() };
        let alignment = gguf.alignment()?;
        let mut entries = Vec::with_capacity(tensor_count);
        for i in 0..tensor_count {
            entries.push(tensor_entry(&mut cursor, i, alignment)?);
        }
        gguf.place(entries, cursor.pos(), alignment as usize)?;
        Ok(gguf)
    }

    fn alignment(&self) -> Result<u64, ModelError> {
        const KEY: &str = "general.alignment";
        let alignment = self.uint(KEY)?.unwrap_or(DEFAULT_ALIGNMENT);
        if !alignment.is_power_of_two() || !ALIGNMENTS.contains(&alignment) {
            let supported = format!("a power of two from {} to {}", ALIGNMENTS.start(), ALIGNMENTS.end());
            return Err(self.bad(format!("metadata {KEY}"), alignment, supported));
        }
        Ok(alignment)
    }

    /// Turns offsets into byte ranges of the file; refuses those that leave it or overlap.
    fn place(
        &mut self,
        entries: Vec<(&str, TensorInfo)>,
        header_end: usize,
        alignment: usize,
    ) -> Result<(), ModelError> {
        let start = header_end.checked_next_multiple_of(alignment).unwrap_or(usize::MAX);
        for (name, mut info) in entries {
            let field = format!("tensor {name}");
            let placed = (info.bytes.start.checked_add(start)).zip(info.bytes.end.checked_add(start));
            let Some((begin, end)) = placed.filter(|&(_, end)| end <= self.source.len()) else {
                let found = format!("data at offset {} of {} bytes", info.bytes.start, info.bytes.len());
                let data = self.source.len().saturating_sub(start);
                return Err(self.bad(field, found, format!("an end inside the file's {data} bytes of data")));
            };
            info.bytes = begin..end;
            if self.tensors.insert(name.into(), info).is_some() {
                return Err(self.bad(field, "the name twice", "each tensor once"));
            }
        }
        let mut by_start: Vec<_> = self.tensors.iter().collect();
        by_start.sort_by_key(|(_, info)| info.bytes.start);
        for pair in by_start.windows(2) {
            let ((first, a), (second, b)) = (pair[0], pair[1]);
            if a.bytes.end > b.bytes.start {
                let found = format!("data that overlaps tensor {first}");
                return Err(self.bad(format!("tensor {second}"), found, "data of its own"));
            }
        }
        Ok(())
    }

    /// An error about `field` of this file.
    pub(crate) fn bad(
        &self,
        field: impl Into<String>,
        found: impl Display,
        supported: impl Display,
    ) -> ModelError {
        ModelError::bad(self.source.name(), field, found, supported)
    }

    /// The file's name, for errors.
    pub fn name(&self) -> &str {
        self.source.name()
    }

    /// The file's bytes.
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// Whether the metadata has `key`, of whatever type.
    pub fn has(&self, key: &str) -> bool {
        self.metadata.contains_key(key)
    }

    /// Entry `name` of the tensor table.
    pub fn tensor_info(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    /// All tensor names, sorted.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(|name| &**name)
    }

    /// The tensor `name` as a view of the file; it must have exactly `shape`, slowest-running size first. All sizes but the last
    /// become rows.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor, ModelError> {
        let Some(info) = self.tensors.get(name) else {
            return Err(ModelError::missing(
                self.name(),
                format!("tensor {name}"),
                format!("shape {shape:?}"),
            ));
        };
        if !info.shape().iter().rev().eq(shape.iter()) {
            let found: Vec<_> = info.shape().iter().rev().collect();
            return Err(self.bad(format!("tensor {name}"), format!("shape {found:?}"), format!("{shape:?}")));
        }
        // A tensor has 1 to 4 dimensions, checked when the table was read, and the product of its sizes did not overflow.
        let (cols, rows) = (info.dims[0], info.dims[1..].iter().product());
        Tensor::new(&self.source, &format!("tensor {name}"), info.bytes.clone(), info.format, rows, cols)
    }
}

fn check_magic(cursor: &mut Cursor) -> Result<(), ModelError> {
    let magic = cursor.bytes4(&"magic")?;
    if &magic != b"GGUF" {
        return Err(cursor.bad(&"magic", magic.escape_ascii(), "GGUF"));
    }
    let version = cursor.u32(&"version")?;
    if !(2..=3).contains(&version) {
        let hint = if (2..=3).contains(&version.swap_bytes()) { " (big-endian file)" } else { "" };
        return Err(cursor.bad(&"version", format!("{version}{hint}"), "2 and 3, little-endian"));
    }
    Ok(())
}

/// Reads one entry of the tensor table. Its byte range still counts from the start of the data.
fn tensor_entry<'a>(
    cursor: &mut Cursor<'a>,
    i: usize,
    alignment: u64,
) -> Result<(&'a str, TensorInfo), ModelError> {
    let name = cursor.name(MAX_TENSOR_NAME_BYTES, &format_args!("tensor {i} name"))?;
    let num_dims = cursor.u32(&format_args!("tensor {name} dimension count"))?;
    if !(1..=MAX_DIMS).contains(&num_dims) {
        return Err(cursor.bad(
            &format_args!("tensor {name} dimension count"),
            num_dims,
            format!("1 to {MAX_DIMS}"),
        ));
    }
    let mut dims = [1usize; 4];
    for (d, dim) in dims.iter_mut().enumerate().take(num_dims as usize) {
        let field = format_args!("tensor {name} dimension {d}");
        let size = cursor.u64(&field)?;
        *dim = match usize::try_from(size) {
            Ok(size) if size > 0 && size <= isize::MAX as usize => size,
            _ => return Err(cursor.bad(&format_args!("tensor {name} dimension {d}"), size, "1 to 2^63 - 1")),
        };
    }
    let type_id = cursor.u32(&format_args!("tensor {name} type"))?;
    let Some(format) = weight_format(type_id) else {
        let known = TYPE_NAMES.iter().find(|(id, _)| *id == type_id).map_or("unknown type", |(_, n)| n);
        let found = format!("{known} ({type_id})");
        return Err(cursor.bad(
            &format_args!("tensor {name} type"),
            found,
            WeightFormat::ALL.map(WeightFormat::name).join(", "),
        ));
    };
    let Some(row_bytes) = format.row_bytes(dims[0]) else {
        let supported = format!("a multiple of {} for {}", format.block_elems(), format.name());
        return Err(cursor.bad(&format_args!("tensor {name} dimension 0"), dims[0], supported));
    };
    let size = dims[1..].iter().try_fold(row_bytes, |n, &d| n.checked_mul(d));
    let Some(size) = size.filter(|&n| n <= isize::MAX as usize) else {
        let found = format!("{:?}, whose size overflows", &dims[..num_dims as usize]);
        return Err(cursor.bad(&format_args!("tensor {name} dimensions"), found, "a size below 2^63 bytes"));
    };
    let offset = cursor.u64(&format_args!("tensor {name} offset"))?;
    if offset % alignment != 0 {
        return Err(cursor.bad(
            &format_args!("tensor {name} offset"),
            offset,
            format!("a multiple of {alignment}"),
        ));
    }
    let start = usize::try_from(offset).unwrap_or(usize::MAX);
    let Some(end) = start.checked_add(size) else {
        return Err(cursor.bad(&format_args!("tensor {name} offset"), offset, "an offset inside the file"));
    };
    Ok((name, TensorInfo { format, dims, num_dims: num_dims as usize, bytes: start..end }))
}
