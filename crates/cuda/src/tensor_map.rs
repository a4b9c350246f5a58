//! Tensor maps for the bulk copy engine: 8- and 16-bit elements, 128-byte swizzle, zeros outside the tensor.
use crate::driver::Address;
use crate::{Dtype, Error};
use cudarc::driver::sys;

/// A tensor map as kernels take it: by value, in constant memory.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct TensorMap(sys::CUtensorMap);

/// Describes a tensor of `dims` elements (innermost first, contiguous), outer strides in *elements*, copied box by box.
pub fn encode(
    dtype: Dtype,
    address: Address,
    dims: &[u64],
    strides: &[u64],
    box_dims: &[u32],
) -> Result<TensorMap, Error> {
    let data_type = match dtype {
        Dtype::Bf16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        Dtype::Fp16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    };
    encode_elements(data_type, 2, address, dims, strides, box_dims)
}

/// The same for elements of one byte.
pub fn encode_bytes(
    address: Address,
    dims: &[u64],
    strides: &[u64],
    box_dims: &[u32],
) -> Result<TensorMap, Error> {
    let data_type = sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8;
    encode_elements(data_type, 1, address, dims, strides, box_dims)
}

fn encode_elements(
    data_type: sys::CUtensorMapDataType,
    element_bytes: u64,
    address: Address,
    dims: &[u64],
    strides: &[u64],
    box_dims: &[u32],
) -> Result<TensorMap, Error> {
    let bad = |field, asked: String, supported| Err(Error::Unsupported { field, asked, supported });
    if !address.is_multiple_of(16) {
        return bad("address", format!("{address:#x}"), "multiples of 16 bytes");
    }
    let refused =
        |s: &&u64| s.checked_mul(element_bytes).is_none_or(|b| !b.is_multiple_of(16) || b >= 1 << 40);
    if let Some(s) = strides.iter().find(refused) {
        return bad("stride", s.to_string(), "multiples of 16 bytes under 2^40 bytes");
    }
    if let Some(d) = dims.iter().find(|d| **d == 0 || **d > 1 << 32) {
        return bad("dimension", d.to_string(), "1 to 2^32 elements");
    }
    let strides_bytes: Vec<u64> = strides.iter().map(|s| s * element_bytes).collect();
    let ones = [1u32; 5];
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    // SAFETY: the arrays hold `dims.len()` entries (strides one fewer) and outlive the call, which only fills `map`.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut map,
            data_type,
            dims.len() as u32,
            address as *mut _,
            dims.as_ptr(),
            strides_bytes.as_ptr(),
            box_dims.as_ptr(),
            ones.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    }
    .result()
    .map_err(crate::driver::call("cuTensorMapEncodeTiled"))?;
    Ok(TensorMap(map))
}
